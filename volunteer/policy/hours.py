"""Hours of the week in which something is allowed, e.g. `mon-fri 18:00-08:00`.

Runs in: every process. Pure.

An entry is days, a space, and one span: `sat 00:00-24:00`, `mon,wed 9:30-12:00`,
`mon-fri 18:00-08:00`. A span that ends at or before its begin ends on the next day. Days wrap too:
`fri-mon`. Times are the owner's wall clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MINUTES = 24 * 60
WEEK_MINUTES = 7 * DAY_MINUTES
_ENTRY = re.compile(r"\s*([a-z,\-]+)\s+(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WeekHours:
    """Minutes of the week, from Monday 00:00."""

    spans: tuple[tuple[int, int], ...]
    """(first, last + 1), ascending, apart from each other; none: never."""

    def is_open(self, minute: int) -> bool:
        """Return whether `minute` of the week is inside."""
        return any(first <= minute < end for first, end in self.spans)

    def minutes_until_open(self, minute: int) -> int | None:
        """Return how many minutes after `minute` it opens next: 0 while open, None: never."""
        if self.is_open(minute):
            return 0
        waits = [(first - minute) % WEEK_MINUTES for first, _ in self.spans]
        return min(waits, default=None)

    def overlap(self, other: WeekHours) -> WeekHours:
        """Return the minutes that are in both."""
        both = (
            (max(first, first_2), min(end, end_2))
            for first, end in self.spans
            for first_2, end_2 in other.spans
        )
        return WeekHours(_merge(span for span in both if span[0] < span[1]))


ALWAYS = WeekHours(((0, WEEK_MINUTES),))


def parse_hours(entries: Iterable[str]) -> WeekHours:
    """Return the union of the entries; none at all means always.

    Raises:
        ValueError: naming the entry that is not understood.
    """
    spans = [span for entry in entries for span in _parse_entry(entry)]
    return WeekHours(_merge(spans)) if spans else ALWAYS


def minute_of_week(local_time: datetime) -> int:
    """Return the minute since Monday 00:00 on the wall clock."""
    return local_time.weekday() * DAY_MINUTES + local_time.hour * 60 + local_time.minute


def seconds_until_open(hours: WeekHours, local_time: datetime) -> float | None:
    """Return how long until `hours` opens; None: never. An hour off where the clocks change."""
    minutes = hours.minutes_until_open(minute_of_week(local_time))
    if not minutes:
        return None if minutes is None else 0.0
    return minutes * 60.0 - local_time.second - local_time.microsecond / 1e6


def _parse_entry(entry: str) -> list[tuple[int, int]]:
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(f"{entry!r} is not like 'mon-fri 18:00-08:00'")
    begin, end = (
        _parse_time(entry, match[hour], match[minute]) for hour, minute in ((2, 3), (4, 5))
    )
    if begin in (DAY_MINUTES, end):
        raise ValueError(f"{entry!r} has no minute in it (a whole day is 00:00-24:00)")
    length = end - begin if end > begin else end - begin + DAY_MINUTES
    spans = []
    for day in _parse_days(entry, match[1]):
        first = day * DAY_MINUTES + begin
        spans.append((first, min(first + length, WEEK_MINUTES)))
        if first + length > WEEK_MINUTES:
            spans.append((0, first + length - WEEK_MINUTES))
    return spans


def _parse_time(entry: str, hour: str, minute: str) -> int:
    minutes = int(hour) * 60 + int(minute)
    if int(minute) > 59 or minutes > DAY_MINUTES:
        raise ValueError(f"{entry!r}: {hour}:{minute} is no time of a day")
    return minutes


def _parse_days(entry: str, text: str) -> list[int]:
    days = []
    for part in text.lower().split(","):
        first, is_range, last = part.partition("-")
        if first not in DAYS or (is_range and last not in DAYS):
            raise ValueError(f"{entry!r}: days are {', '.join(DAYS)}, like mon-fri or sat,sun")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        days += [day % 7 for day in range(begin, end + 1 if end >= begin else end + 8)]
    return days


def _merge(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, end in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)
