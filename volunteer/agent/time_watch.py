"""Tells the log when time itself was odd: a clock that was set, a process that stood still.

Runs in: agent. Nothing depends on either: durations come from a clock that nobody sets, and who
stands still has only missed something. But an owner who reads the log should not have to guess why
its dates jump, or why nothing happened for a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import trio

from volunteer.agent.clock import now_s

log = logging.getLogger(__name__)
LOOK_EVERY_S = 2.0
MIN_SET_S = 60.0
"""By so much the clock must have been set: less is how clocks are kept right."""
MIN_STILL_S = 20.0
"""Longer than a busy machine makes anybody wait."""


@dataclass(slots=True)
class TimeWatch:
    """Compares the clocks with what they said at the last look."""

    clock_s: Callable[[], float] = now_s
    """Counts sleep, and is never set."""
    wall_s: Callable[[], float] = time.time
    awake_s: Callable[[], float] = time.monotonic
    """Does not count sleep, where the system has such a clock."""
    _looked_at_s: float | None = None
    _wall_ahead_s: float = 0.0
    _asleep_s: float = 0.0

    def look(self) -> list[str]:
        """Return what was odd since the last look, as sentences."""
        at_s = self.clock_s()
        wall_ahead_s, asleep_s = self.wall_s() - at_s, at_s - self.awake_s()
        told: list[str] = []
        if self._looked_at_s is not None:
            slept_s = asleep_s - self._asleep_s
            still_s = at_s - self._looked_at_s - LOOK_EVERY_S - slept_s
            if slept_s >= LOOK_EVERY_S:
                told.append(f"the machine has slept for {slept_s:.0f} s")
            if still_s >= MIN_STILL_S:
                told.append(f"this program stood still for {still_s:.0f} s")
            set_s = wall_ahead_s - self._wall_ahead_s
            if abs(set_s) >= MIN_SET_S:
                told.append(f"the system's clock was set {_described(set_s)}")
        self._looked_at_s, self._wall_ahead_s, self._asleep_s = at_s, wall_ahead_s, asleep_s
        return told

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            for sentence in self.look():
                log.warning("%s: nothing is lost by it", sentence)
            await trio.sleep(LOOK_EVERY_S)  # noqa: TID251 - a period


def _described(set_s: float) -> str:
    where = "forward" if set_s > 0 else "back"
    hours, minutes = divmod(round(abs(set_s) / 60), 60)
    if not hours:
        return f"{where} by {minutes} min"
    return f"{where} by {hours} h {minutes} min" if minutes else f"{where} by {hours} h"
