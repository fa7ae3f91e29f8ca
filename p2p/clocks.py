"""What the peers' clocks show, compared with ours. Runs in: agent. Pure: clocks come in.

No rule of the protocol compares clocks; this is for the owner, whose hours, logs and certificates
depend on a clock that is right. Whole seconds are told: enough to see that a clock is wrong, too
little to know a machine again by its clock's drift.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from p2p.swarm_types import ClockView

MAX_KNOWN: Final = 256  # peer ids cost nothing
TELL_FOR_S: Final = 3600.0
_RESOLUTION_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Reading:
    utc_less_monotonic_s: float
    """The peer's clock less our monotonic one: the same whatever becomes of our own clock."""
    error_s: float
    told_at_s: float


class Clocks:
    """The latest reading of each peer."""

    def __init__(self, utc_s: Callable[[], float] = time.time) -> None:
        """Compare with `utc_s`: our own clock, seconds since 1970."""
        self._utc_s = utc_s
        self._readings: OrderedDict[str, _Reading] = OrderedDict()

    def own_utc_s(self) -> int:
        """Give what our clock shows, as it is told to others."""
        return max(0, int(self._utc_s()))

    def note(self, peer_id: str, utc_s: int, asked_at_s: float, answered_at_s: float) -> None:
        """Note what a peer said: its clock was read between the two monotonic instants."""
        middle_s = (asked_at_s + answered_at_s) / 2
        self._readings.pop(peer_id, None)
        self._readings[peer_id] = _Reading(
            utc_s + _RESOLUTION_S / 2 - middle_s,
            (_RESOLUTION_S + answered_at_s - asked_at_s) / 2,
            answered_at_s,
        )
        if len(self._readings) > MAX_KNOWN:
            self._readings.popitem(last=False)

    def views(self, now_s: float) -> tuple[ClockView, ...]:
        """List whose clock was told within the hour, against what ours shows now."""
        own_s = self._utc_s() - now_s
        return tuple(
            ClockView(
                peer_id=peer_id,
                ahead_s=reading.utc_less_monotonic_s - own_s,
                error_s=reading.error_s,
            )
            for peer_id, reading in self._readings.items()
            if now_s - reading.told_at_s <= TELL_FOR_S
        )
