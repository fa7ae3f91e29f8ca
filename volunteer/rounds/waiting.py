"""Commits whose parent or listed records are not here yet.

Runs in: agent, simulation. Pure.

Anyone can sign a commit that lists what never was, so there is a bound: first go those whose
proposer has no turn on our chain, the highest first; the lowest are needed first, and what is
forgotten is exchanged again. Contributions that wait with a commit are bounded by it as well.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import dataclass, field

from volunteer.rounds.records import Commit

MAX_WAITING_COMMITS = 512
MAX_WAITING_LISTED = 4096
"""Records that are here and that waiting commits list, counted once for each such commit."""
MAX_COMMITS_ASKED_FOR = 64
"""What so many waiting commits lack, the first in order, is asked for by name at a time."""

_Place = tuple[bool, int, str]


@dataclass(slots=True)
class Waiting:
    """The commits that wait, and what for."""

    commits: dict[str, Commit] = field(default_factory=dict)
    _lacks: dict[str, set[str]] = field(default_factory=dict)
    """Commit -> what is missing: listed records, or a parent that is missing or waits itself."""
    _needed_by: dict[str, set[str]] = field(default_factory=dict)
    _listed_by: dict[str, set[str]] = field(default_factory=dict)
    """Record, here or not -> waiting commits that list it."""
    _places: dict[str, _Place] = field(default_factory=dict)
    _order: list[_Place] = field(default_factory=list)
    """(is its proposer without a turn, height, id), sorted."""
    _num_listed_here: int = 0

    def put(
        self, commit_id: str, commit: Commit, lacks: Collection[str], *, has_turn: bool
    ) -> None:
        """Have a commit wait for `lacks`; `has_turn` says that its proposer may well be needed."""
        place = (not has_turn, commit.round_index, commit_id)
        self.commits[commit_id] = commit
        self._places[commit_id] = place
        bisect.insort(self._order, place)
        self._lacks[commit_id] = set(lacks)
        for missing_id in lacks:
            self._needed_by.setdefault(missing_id, set()).add(commit_id)
        for listed_id in (*commit.contributions, *commit.leaving):
            self._listed_by.setdefault(listed_id, set()).add(commit_id)
            self._num_listed_here += listed_id not in self._lacks[commit_id]

    def remove(self, commit_id: str) -> Commit:
        """Let a commit wait no more."""
        commit = self.commits.pop(commit_id)
        place = self._places.pop(commit_id)
        del self._order[bisect.bisect_left(self._order, place)]
        lacks = self._lacks.pop(commit_id)
        for missing_id in lacks:
            _drop(self._needed_by, missing_id, commit_id)
        for listed_id in (*commit.contributions, *commit.leaving):
            _drop(self._listed_by, listed_id, commit_id)
            self._num_listed_here -= listed_id not in lacks
        return commit

    def arrived(self, record_id: str) -> list[str]:
        """A record, or the facts of a commit, are here: return what needs nothing any more."""
        complete = []
        for commit_id in sorted(self._needed_by.pop(record_id, ())):
            lacks = self._lacks[commit_id]
            lacks.discard(record_id)
            self._num_listed_here += record_id != self.commits[commit_id].parent
            if not lacks:
                complete.append(commit_id)
        return complete

    def children_of(self, commit_id: str) -> list[str]:
        """Return the commits that wait for this one as their parent."""
        needing = self._needed_by.get(commit_id, ())
        return sorted(i for i in needing if self.commits[i].parent == commit_id)

    def needs(self, record_id: str) -> bool:
        """Return whether a waiting commit lists this record, or has it as its parent."""
        return record_id in self._needed_by or record_id in self._listed_by

    def would_be_last(self, commit_id: str, height: int, *, has_turn: bool) -> bool:
        """Return whether a commit would have to go at once."""
        is_full = len(self.commits) >= MAX_WAITING_COMMITS
        return is_full and (not has_turn, height, commit_id) > self._order[-1]

    def overflow(self) -> str | None:
        """Return the commit that has to go, the last in order; None while there is room."""
        is_full = len(self.commits) > MAX_WAITING_COMMITS
        if is_full or self._num_listed_here > MAX_WAITING_LISTED:
            return self._order[-1][2]
        return None

    def missing_ids(self) -> list[str]:
        """Return what to ask for by name, sorted: what the first commits lack."""
        if not self.commits:
            return []
        first = (commit_id for _, _, commit_id in self._order[:MAX_COMMITS_ASKED_FOR])
        missing = {i for commit_id in first for i in self._lacks[commit_id]}
        return sorted(i for i in missing if i not in self.commits)


def _drop(index: dict[str, set[str]], key: str, commit_id: str) -> None:
    index[key].discard(commit_id)
    if not index[key]:
        del index[key]
