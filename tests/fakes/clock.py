"""Clocks that only tests move."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


class FakeClock:
    """Seconds from 0, and the wall-clock time that goes with them."""

    def __init__(self, start_utc: str = "2026-11-30T08:00:00Z") -> None:
        """Begin at `start_utc`."""
        self._start = datetime.strptime(start_utc, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
        self._now_s = 0.0

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._now_s += seconds

    def now_s(self) -> float:
        """Return seconds since the beginning."""
        return self._now_s

    def now_utc(self) -> str:
        """Return the wall-clock time as the program writes it."""
        return (self._start + timedelta(seconds=self._now_s)).strftime("%Y-%m-%dT%H:%M:%SZ")
