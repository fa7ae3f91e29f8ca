"""Since when a member could follow the others, and whether they know that it goes.

Runs in: agent, simulation. Pure.

Rules 20 and 23 count the time since the tip was applied. A pause or a closed lid is in it, which is
no waiting: who comes back after nine rounds and acts at once acts on what all others have left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

AWAY_FRACTION = 0.5
"""A member to which nothing has come, not even a tick, for this part of a round was away."""
LEAST_AWAY_S = 10.0
"""A busy machine's ticks may be late by seconds, which is much of a short round."""


@dataclass(slots=True)
class Presence:
    """Since when a member is there, on its own clock in seconds, and whether it has left."""

    since_s: float = -math.inf
    """When it began to contribute, or was there again."""
    heard_at_s: float = -math.inf
    """When the last event came."""
    has_left: bool = True
    """Whether nobody waits for it: it has said farewell, or not contributed since the start."""
    _is_paused: bool = False
    """Told to stop, not only not yet told to start."""

    def hear(self, now_s: float, round_s: float) -> None:
        """Something has come: a tick, if nothing else."""
        if now_s - self.heard_at_s > max(LEAST_AWAY_S, AWAY_FRACTION * round_s):
            self.since_s = now_s
        self.heard_at_s = now_s

    def changed(self, now_s: float, *, is_contributing: bool) -> None:
        """The owner has the member begin, or stop."""
        self.since_s = now_s
        self._is_paused = not is_contributing

    def takes_leave(self) -> bool:
        """Tell once whether to tell the others that nobody need wait for us."""
        takes_leave = self._is_paused and not self.has_left
        self.has_left |= takes_leave
        return takes_leave

    def waited_s(self, since_s: float, now_s: float) -> float:
        """Return how much of the time since `since_s` it could follow the others."""
        return now_s - max(since_s, self.since_s)
