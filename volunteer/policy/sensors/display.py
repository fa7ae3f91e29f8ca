"""What a source that sees the input of a desktop says.

Runs in: agent.
"""

from __future__ import annotations

from dataclasses import dataclass

_SAME_S = 0.3
"""How far apart two answers about the same touch may be, through rounding and waiting."""


@dataclass(frozen=True, slots=True)
class DisplayReading:
    """When a desktop was last touched."""

    touched_at_s: float
    """Instant on the monotonic clock of the last key or movement."""
    is_saver_on: bool = False
    """Whether its screen saver shows."""
    is_inhibited: bool = False
    """Whether a program asks the compositor not to count as idle."""


def is_news(before: DisplayReading | None, after: DisplayReading | None) -> bool:
    """Return whether somebody has touched it since, or anything else has changed."""
    if before is None or after is None:
        return before is not after
    has_moved = abs(after.touched_at_s - before.touched_at_s) > _SAME_S
    return has_moved or before.is_inhibited != after.is_inhibited
