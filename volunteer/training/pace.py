"""How much of the time the trainer works, and how soon it can stop.

Runs in: trainer. Pure.
"""

from __future__ import annotations

MAX_MICRO_BATCH_S = 0.5
"""A stop is seen between two micro-batches, and the owner waits for it."""
SLOW_IN_A_ROW = 3
"""So many too long ones are the micro-batch's size; one alone is the machine's hiccup."""


class DutyCycle:
    """Works for a fraction of the time: after so much work, so much rest is owed."""

    def __init__(self, fraction: float) -> None:
        """Work for `fraction` of the time, above 0, at most 1."""
        self._rest_per_work = 1.0 / fraction - 1.0
        self.owed_s = 0.0
        """Seconds of rest that are due now."""

    def note_work(self, duration_s: float) -> None:
        """Count work; it is paid for with rest."""
        self.owed_s += duration_s * self._rest_per_work

    def note_rest(self, duration_s: float) -> None:
        """Count rest. More than was due is not saved up: what follows is paid for again."""
        self.owed_s = max(0.0, self.owed_s - duration_s)


class MicroBatchWatch:
    """Tells when micro-batches take so long that the owner would notice."""

    def __init__(self) -> None:
        """Nothing was seen yet."""
        self._began_at_s: float | None = None
        self._num_slow = 0

    def note_begin(self, now_s: float) -> None:
        """A micro-batch begins, and with it ends the one before."""
        self.note_end(now_s)
        self._began_at_s = now_s

    def note_end(self, now_s: float) -> None:
        """The last one has ended, or no step was taken."""
        if self._began_at_s is not None:
            is_slow = now_s - self._began_at_s > MAX_MICRO_BATCH_S
            self._num_slow = self._num_slow + 1 if is_slow else 0
        self._began_at_s = None

    def take_verdict(self) -> bool:
        """Return whether they should be smaller; the count begins anew then."""
        if self._num_slow < SLOW_IN_A_ROW:
            return False
        self._num_slow = 0
        return True
