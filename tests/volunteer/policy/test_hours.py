"""Hours of the week: what is understood, when it opens next, what two of them share."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volunteer.policy.hours import (
    ALWAYS,
    DAY_MINUTES,
    DAYS,
    WEEK_MINUTES,
    WeekHours,
    minute_of_week,
    parse_hours,
    seconds_until_open,
)


def at(day: str, hour: int, minute: int = 0) -> int:
    return DAYS.index(day) * DAY_MINUTES + hour * 60 + minute


@pytest.mark.parametrize(
    ("entries", "open_at", "closed_at"),
    [
        (["mon 9:00-17:00"], [at("mon", 9), at("mon", 16, 59)], [at("mon", 8, 59), at("mon", 17)]),
        (["sat,sun 00:00-24:00"], [at("sat", 0), at("sun", 23, 59)], [at("mon", 0)]),
        (
            ["mon-fri 18:00-08:00"],
            [at("mon", 18), at("tue", 7, 59), at("sat", 7)],
            [at("mon", 7), at("tue", 8), at("sat", 8), at("sat", 20)],
        ),
        (["sun 22:00-06:00"], [at("sun", 23), at("mon", 5)], [at("mon", 6), at("sun", 21)]),
        (["fri-mon 12:00-13:00"], [at("sun", 12), at("mon", 12)], [at("tue", 12), at("thu", 12)]),
        (["SUN 00:00 - 24:00"], [at("sun", 1)], [at("sat", 1)]),
        (["mon 22:00-00:00"], [at("mon", 23, 59)], [at("tue", 0)]),
        ([], [0, WEEK_MINUTES - 1], []),
    ],
)
def test_entries_are_understood(
    entries: list[str], open_at: list[int], closed_at: list[int]
) -> None:
    hours = parse_hours(entries)
    assert all(hours.is_open(minute) for minute in open_at)
    assert not any(hours.is_open(minute) for minute in closed_at)


@pytest.mark.parametrize(
    "entry",
    ["", "mon", "18:00-08:00", "mon 18-08", "mon 18:00-08:60", "mon 25:00-26:00", "moon 1:00-2:00",
     "mon-moon 1:00-2:00", "mon 24:00-24:00", "mon 10:00-10:00", "mon 24:01-3:00", "mon, 1:0-2:00"],
)  # fmt: skip
def test_other_entries_are_refused_by_name(entry: str) -> None:
    with pytest.raises(ValueError, match="'") as caught:
        parse_hours(["sat 00:00-24:00", entry])
    assert repr(entry) in str(caught.value)


def test_when_it_opens_next() -> None:
    hours = parse_hours(["tue 14:00-16:00", "sat 1:00-2:00"])
    assert hours.minutes_until_open(at("tue", 15)) == 0
    assert hours.minutes_until_open(at("tue", 13, 59)) == 1
    assert hours.minutes_until_open(at("sun", 0)) == at("wed", 14)
    assert WeekHours(()).minutes_until_open(5) is None
    half_a_minute_early = datetime(2026, 12, 1, 13, 59, 30)
    assert seconds_until_open(hours, half_a_minute_early) == 30.0
    assert seconds_until_open(hours, datetime(2026, 12, 1, 14, 0, 30)) == 0.0
    assert seconds_until_open(WeekHours(()), half_a_minute_early) is None
    assert minute_of_week(datetime(2026, 11, 29, 23, 59)) == WEEK_MINUTES - 1


def test_two_that_never_meet_share_nothing() -> None:
    day, night = parse_hours(["mon-sun 8:00-20:00"]), parse_hours(["mon-sun 20:00-8:00"])
    assert day.overlap(night).spans == ()
    assert day.overlap(ALWAYS) == day


spans = st.tuples(st.integers(0, WEEK_MINUTES - 1), st.integers(1, 600))
weeks = st.lists(spans, max_size=5).map(
    lambda found: ALWAYS.overlap(
        WeekHours(tuple((first, first + length) for first, length in found))
    )
)


@given(one=weeks, two=weeks, minute=st.integers(0, WEEK_MINUTES - 1))
def test_any_two_weeks_share_what_both_have(one: WeekHours, two: WeekHours, minute: int) -> None:
    both = one.overlap(two)
    assert both.is_open(minute) == (one.is_open(minute) and two.is_open(minute))
    wait = both.minutes_until_open(minute)
    if wait is not None:
        assert both.is_open((minute + wait) % WEEK_MINUTES)
        assert not any(both.is_open((minute + k) % WEEK_MINUTES) for k in range(0, wait, 7))
