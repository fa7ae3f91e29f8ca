"""Whether a trainer hangs: judged by the inner steps that it has really taken.

Runs in: agent. Pure.

Not by what it answers: a trainer whose device hangs may still obey, and would look alive for ever.
Time counts in small parts: where the whole machine, or the agent with the trainer, stood still,
the clock jumps when it goes on, and nobody has watched meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

WATCH_EVERY_S = 5.0
SILENCE_DEADLINE_S = 300.0
"""Without a step for so long after it was told where to stand, it hangs and is started again. A
checkpoint of a billion parameters takes two minutes on a slow disk."""
SLOWEST_TIMES = 20.0
"""Or for so many times the longest that it has needed: a slow machine may take its time."""


@dataclass(slots=True)
class StepWatch:
    """Watches one process from its start."""

    _silent_s: float = 0.0
    _slowest_s: float = 0.0
    _is_waiting: bool = False
    """Whether it has nothing to do: started, and not told yet where to stand."""
    _has_rebased: bool = False
    is_preparing: bool = False
    """Whether it makes tokens of its data, and has not begun yet."""

    @property
    def deadline_s(self) -> float:
        """How long it may be silent."""
        return max(SILENCE_DEADLINE_S, SLOWEST_TIMES * self._slowest_s)

    def note_started(self) -> None:
        """It is up, and waits until it is told where to stand, however long that takes."""
        self._is_waiting = True

    def note_preparing(self) -> None:
        """It makes tokens of its data, which may take hours the first time, and gets on."""
        self.is_preparing, self._silent_s = True, 0.0

    def note_prepared(self) -> None:
        """It has its data."""
        self.is_preparing = False

    def note_placed(self) -> None:
        """It was told where to stand."""
        self._is_waiting, self._silent_s = False, 0.0

    def note_rebased(self) -> None:
        """It stands: the first time it has read its weights, and has its steps still before it."""
        if not self._has_rebased:
            self._has_rebased, self._silent_s = True, 0.0

    def note_step(self) -> None:
        """It has taken an inner step."""
        self._slowest_s = max(self._slowest_s, self._silent_s)
        self._silent_s = 0.0

    def is_hung(self, passed_s: float) -> bool:
        """Count time; return whether it has been silent for too long.

        Args:
            passed_s: since the last call, which should be `WATCH_EVERY_S`; more than twice that was
                not watched.
        """
        if not self._is_waiting:
            self._silent_s += min(passed_s, 2 * WATCH_EVERY_S)
        return self._silent_s >= self.deadline_s
