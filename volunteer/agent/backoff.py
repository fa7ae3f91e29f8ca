"""How long to wait before a child that crashed is started again, and when to give up for longer.

Runs in: agent. Pure.

Two counts: crashes in a row without any progress between them, and crashes within a time however
much was done between them: a child that crashes after each second step is no less broken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MAX_CRASHES = 5
"""After so many, in a row or within `CRASH_WINDOW_S`, it is put into quarantine."""
CRASH_WINDOW_S = 600.0
"""Five crashes at two minutes each lose more than they give; rarer ones cost little."""
QUARANTINE_S = 3600.0
"""Then it is tried once more by itself: a driver may have been mended. The owner's `resume` tries
again at once."""


@dataclass(slots=True)
class Backoff:
    """Counts the crashes of one child."""

    crashes: int = 0
    """In a row."""
    _crashed_at_s: deque[float] = field(default_factory=deque)

    @property
    def is_broken(self) -> bool:
        """Whether it is in quarantine."""
        return max(self.crashes, len(self._crashed_at_s)) >= MAX_CRASHES

    def note_crash(self, now_s: float) -> float:
        """Count a crash; return the seconds to wait: 1, 2, 4, 8, and then the quarantine."""
        self.crashes += 1
        self._crashed_at_s.append(now_s)
        while now_s - self._crashed_at_s[0] >= CRASH_WINDOW_S:
            self._crashed_at_s.popleft()
        return QUARANTINE_S if self.is_broken else float(2 ** (self.crashes - 1))

    def note_progress(self) -> None:
        """It does what it is for: the crashes are no longer in a row."""
        self.crashes = 0

    def begin_trial(self) -> None:
        """Leave the quarantine for one try: another crash without progress ends it."""
        self.crashes = MAX_CRASHES - 1
        self._crashed_at_s.clear()

    def forgive(self) -> None:
        """Forget everything: the owner has asked to try again."""
        self.crashes = 0
        self._crashed_at_s.clear()
