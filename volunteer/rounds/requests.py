"""What has been asked of the driver and is not answered yet.

Runs in: agent, simulation. Pure.

Trainer and aggregator do one thing of a kind at a time. What failed is asked for again after a
pause that grows, so that a driver that fails at once does not spin.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from enum import Enum

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
RECORD_AGAIN_S = 15.0
"""A record that nobody had is asked for again; the exchange with neighbours brings it as well."""

WITHHELD_FAILURES = 3
"""After so many failures in a row another branch is looked at meanwhile."""


_NOTHING: frozenset[str] = frozenset()


class Kind(Enum):
    """Of requests of which one is under way at a time."""

    ENCODE = "encode"
    COMPUTE = "compute"
    PROPOSE = "propose"
    FETCH_STATE = "fetch_state"


@dataclass(slots=True)
class Requests:
    """Requests under way and failures so far."""

    num_failed: int = 0
    """Counts failures: while it stays the same, what was asked for once need not be asked again."""
    looked_at_s: float = 0.0
    """When it was last asked for all that could be asked for, on our own clock."""
    _busy: dict[Kind, str] = field(default_factory=dict)
    asked_at_s: dict[str, float] = field(default_factory=dict)
    """Blobs and records asked for that have neither failed since, nor come anew."""
    _failures: dict[str, int] = field(default_factory=dict)
    _rest_until_s: dict[str, float] = field(default_factory=dict)
    _due_s: list[float] = field(default_factory=list)
    """Times that `note_due` was told, as a heap."""
    _often_failed: set[str] = field(default_factory=set)
    """Subjects with WITHHELD_FAILURES failures in a row."""

    def is_busy(self, kind: Kind) -> bool:
        """Return whether a request of this kind is under way."""
        return kind in self._busy

    def under_way(self, kind: Kind) -> str:
        """Return the subject of the request of this kind; empty while there is none."""
        return self._busy.get(kind, "")

    def begin(self, kind: Kind, subject: str, now_s: float) -> bool:
        """Return whether this may be asked for now, and note that it is under way."""
        if kind in self._busy or self._is_resting(subject, now_s):
            return False
        self._busy[kind] = subject
        return True

    def ask(self, subject: str, now_s: float, again_s: float | None = None) -> bool:
        """Return whether to ask for a blob or record now: once, or again after `again_s`."""
        asked_at_s = self.asked_at_s.get(subject)
        if asked_at_s is not None and (again_s is None or now_s < asked_at_s + again_s):
            return False
        if self._is_resting(subject, now_s):
            return False
        self.asked_at_s[subject] = now_s
        if again_s is not None:
            self.note_due(now_s + again_s)
        return True

    def end(self, kind: Kind, subject: str) -> None:
        """A request of this kind was answered."""
        if self._busy.get(kind) == subject:
            del self._busy[kind]
        self._forget_failures(subject)

    def end_state(self, commit_id: str) -> None:
        """The state after a commit was computed, fetched, or refused."""
        self.end(Kind.COMPUTE, commit_id)
        self.end(Kind.FETCH_STATE, commit_id)

    def arrived(self, subject: str) -> None:
        """A blob or record that may have been asked for is here."""
        self.asked_at_s.pop(subject, None)
        self._forget_failures(subject)

    def failed(self, subject: str, now_s: float) -> None:
        """A request for `subject` could not be done: ask again after a while."""
        was_asked = self.asked_at_s.pop(subject, None) is not None
        kinds = [kind for kind, busy in self._busy.items() if busy == subject]
        for kind in kinds:
            del self._busy[kind]
        if was_asked or kinds:
            failures = self._failures.get(subject, 0)
            self._failures[subject] = failures + 1
            self.num_failed += 1
            if failures + 1 >= WITHHELD_FAILURES:
                self._often_failed.add(subject)
            pause_s = min(FIRST_PAUSE_S * 2.0 ** min(failures, 16), LONGEST_PAUSE_S)
            self._rest_until_s[subject] = now_s + pause_s
            self.note_due(now_s + pause_s)

    def failures_of(self, subject: str) -> int:
        """Return how often in a row this has failed."""
        return self._failures.get(subject, 0)

    def seems_withheld(self, subject: str, now_s: float) -> bool:
        """Return whether this has just failed again, after having failed often."""
        return subject in self._often_failed and self._is_resting(subject, now_s)

    def note_due(self, at_s: float) -> None:
        """From `at_s` on, something may be asked for that may not be before."""
        heapq.heappush(self._due_s, at_s)

    def is_any_due(self, now_s: float) -> bool:
        """Return whether such a time has come since the last look at everything."""
        due_s = self._due_s
        while due_s and due_s[0] <= self.looked_at_s:
            heapq.heappop(due_s)
        return bool(due_s) and due_s[0] <= now_s

    def all_withheld(self, now_s: float) -> frozenset[str]:
        """Return everything of which `seems_withheld` is true."""
        if not self._often_failed:
            return _NOTHING
        rest_until_s = self._rest_until_s
        return frozenset([i for i in self._often_failed if now_s < rest_until_s[i]])

    def aggregator_ended(self) -> None:
        """What it was computing may be asked for again."""
        self._busy.pop(Kind.COMPUTE, None)
        self._busy.pop(Kind.PROPOSE, None)

    def _is_resting(self, subject: str, now_s: float) -> bool:
        return now_s < self._rest_until_s.get(subject, now_s)

    def _forget_failures(self, subject: str) -> None:
        if self._failures.pop(subject, None) is not None:
            self._often_failed.discard(subject)
            self._rest_until_s.pop(subject, None)
