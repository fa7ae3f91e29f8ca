"""The agent's clock: seconds that never go back and count sleep.

Runs in: agent. Durations come from here; wall-clock time is only for people.
"""

from __future__ import annotations

import sys
import time
from datetime import UTC, datetime, timedelta


def now_s() -> float:
    """Return seconds since some fixed instant, time asleep included."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        # CLOCK_MONOTONIC goes on while a Mac sleeps; time.monotonic() does not.
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()


def now_utc() -> str:
    """Return the wall-clock time for people, e.g. `2026-11-30T08:15:00Z`."""
    return utc_in(0.0)


def utc_in(seconds: float) -> str:
    """Return the wall-clock time in `seconds` from now, as `now_utc` does."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
