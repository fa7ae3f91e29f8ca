"""Numbers, times, durations and foreign text."""

from __future__ import annotations

import unicodedata
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tui import wording
from tui.durations import parse_duration
from tui.wording import NOT_YET

NOW = datetime(2026, 11, 30, 14, 3, 22, tzinfo=timezone(timedelta(hours=1)))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (999.6, "1.00k"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (999_499, "999k"),
        (999_950, "1.00M"),
        (12_431_360, "12.4M"),
        (1.5e9, "1.50G"),
        (2e12, "2.00T"),
        (3.456e15, "3.46P"),
        (0.25, "0.25"),
        (99.96, "100"),
    ],
)
def test_scaled(value: float, text: str) -> None:
    assert wording.format_scaled(value) == text


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=10**18))
def test_scaled_numbers_stay_short_and_close(value: int) -> None:
    text = wording.format_scaled(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}.get(text[-1], 1.0)
    shown = float(text.rstrip("kMGTP")) * scale
    assert len(text) <= 6
    assert abs(shown - value) <= 0.006 * max(value, 1)


def test_unknown_numbers_are_not_yet() -> None:
    assert wording.format_tokens(None) == NOT_YET
    assert wording.format_tokens(1) == "1 token"
    for rate in (None, 0.0, -1.0, float("nan"), float("inf")):
        assert wording.format_rate(rate) == NOT_YET
    for loss in (None, float("nan"), float("inf")):
        assert wording.format_loss(loss) == NOT_YET
    for duration in (None, -1.0, float("nan")):
        assert wording.format_duration(duration) == NOT_YET


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.2, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (372.0, "6 min 12 s"),
        (7384.0, "2 h 03 min"),
        (273_600.0, "3 d 4 h"),
    ],
)
def test_durations(duration_s: float, text: str) -> None:
    assert wording.format_duration(duration_s) == text


def test_stopwatch() -> None:
    assert wording.format_stopwatch(250.9) == "4:10"
    assert wording.format_stopwatch(3850.0) == "1:04:10"
    assert wording.format_stopwatch(float("nan")) == "0:00"


def test_bytes() -> None:
    assert wording.format_bytes(999) == "999 B"
    assert wording.format_bytes(1_400_000) == "1.40 MB"


def test_utc_is_shown_as_local_time() -> None:
    assert wording.format_utc("2026-11-30T12:57:10Z", NOW) == "13:57:10"
    assert wording.format_utc("2026-11-30T12:57:10", NOW) == "13:57:10"
    assert wording.format_utc("2026-11-28T23:30:00+00:00", NOW) == "29 Nov 00:30"
    for text in ("", "soon"):
        assert wording.format_utc(text, NOW) == NOT_YET
    assert wording.format_instant(datetime(2026, 11, 30, 9, 0, tzinfo=UTC), NOW) == "10:00:00"


@settings(deadline=None)
@given(st.text(max_size=400))
def test_clean_text_cannot_move_the_cursor(text: str) -> None:
    shown = wording.clean(text, limit=50)
    assert len(shown) <= 50
    assert not [c for c in shown if c != " " and unicodedata.category(c)[0] in "CZ"]


def test_long_text_is_cut_visibly() -> None:
    assert wording.clean("abcdef", limit=4) == "abc…"
    assert wording.clean("abcd", limit=4) == "abcd"


def test_short_ids_keep_the_end() -> None:
    assert wording.short_id("12D3KooWabcdefgh") == "…abcdefgh"
    assert wording.short_id("short") == "short"


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("90s", 90), ("15m", 900), (" 2H ", 7200), ("1d", 86400), ("0.5h", 1800)],
)
def test_durations_are_parsed(text: str, duration_s: float) -> None:
    assert parse_duration(text) == duration_s


@pytest.mark.parametrize("text", ["", "2", "h", "2x", "-1h", "1h30m", "0s", "367d", "1e9s", "٣h"])
def test_wrong_durations_say_what_is_understood(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|out of range"):
        parse_duration(text)
