"""How fast something has come lately. Runs in: agent. Pure: the clock comes in."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 10.0  # what came so long ago counts for a third of what comes now


class Speed:
    """A rate in which older bytes fade."""

    def __init__(self, now_s: float) -> None:
        """Begin at `now_s`, in monotonic seconds."""
        self._begun_at_s = self._at_s = now_s
        self._faded_bytes = 0.0

    def note(self, num_bytes: int, now_s: float) -> None:
        """Take in bytes that have come."""
        self._faded_bytes = self._faded(now_s) + num_bytes
        self._at_s = now_s

    def bytes_per_s(self, now_s: float) -> float:
        """Give the rate; right from the beginning on."""
        weight_s = MEMORY_S * -math.expm1(-(now_s - self._begun_at_s) / MEMORY_S)
        return self._faded(now_s) / weight_s if weight_s > 0.0 else 0.0

    def _faded(self, now_s: float) -> float:
        return self._faded_bytes * math.exp(-(now_s - self._at_s) / MEMORY_S)
