"""How long to wait before a child that crashed is started again.

Runs in: agent. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_CRASHES = 5
"""After so many without progress between, it is not started again by itself."""


@dataclass(slots=True)
class Backoff:
    """Counts crashes in a row; progress forgives them."""

    crashes: int = 0

    @property
    def is_broken(self) -> bool:
        """Whether to give up until the owner asks again."""
        return self.crashes >= MAX_CRASHES

    def note_crash(self) -> float:
        """Count a crash; return the seconds to wait: 1, 2, 4, 8, 16."""
        self.crashes += 1
        return float(2 ** min(self.crashes - 1, 6))

    def note_progress(self) -> None:
        """Forget the crashes."""
        self.crashes = 0
