"""How long members stand on different chains, and how much of that the net can be blamed for.

Runs in: simulation. While some of those that are up cannot hear the others, not even through third
ones, no rule can bring them together; invariant I6 of ROUNDS.md is about the time after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Disagreement:
    """What is told every few seconds, and the longest stretches so far."""

    longest_s: float = 0.0
    longest_whole_s: float = 0.0
    """Without a moment in which the net was in parts."""
    _since_s: float | None = None
    _whole_since_s: float = 0.0

    def look(self, now_s: float, is_one: bool, is_whole: Callable[[], bool]) -> None:
        """Note whether all stand on one chain now, and if not, whether all can hear each other."""
        if is_one:
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = self._whole_since_s = now_s
        if not is_whole():
            self._whole_since_s = now_s
        self.longest_s = max(self.longest_s, now_s - self._since_s)
        self.longest_whole_s = max(self.longest_whole_s, now_s - self._whole_since_s)
