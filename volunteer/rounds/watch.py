"""Notices peers that sign two things of which only one may be.

Runs in: agent, simulation. Pure. ROUNDS.md rule 26: both records are kept as the proof.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from volunteer.rounds.records import Commit, Contribution, Record, author_of

MAX_SEEN = 2**14
"""Votes remembered, and commits: two farther apart go unnoticed, and nothing rests on that."""

_Key = TypeVar("_Key")


@dataclass(slots=True)
class Watch:
    """What was seen signed, and who was caught."""

    banned: set[str] = field(default_factory=set)
    _voted: dict[tuple[str, int], str] = field(default_factory=dict)
    _proposed: dict[tuple[str, str, int], str] = field(default_factory=dict)

    def see(self, record_id: str, record: Record) -> tuple[str, str, str] | None:
        """Return (first, second, reason) when `record` proves, first of all, a peer dishonest."""
        match record:
            case Commit():
                key = (record.proposer, record.parent, record.rank)
                first = _first_seen(self._proposed, key, record_id)
                reason = "two commits for one parent and rank"
            case Contribution(vote=True):
                voter = (record.author, record.round_index)
                first = _first_seen(self._voted, voter, record_id)
                reason = "two votes at one height"
            case _:
                return None
        author = author_of(record)
        if first == record_id or author in self.banned:
            return None
        self.banned.add(author)
        return first, record_id, reason


def _first_seen(seen: dict[_Key, str], key: _Key, record_id: str) -> str:
    first = seen.setdefault(key, record_id)
    if len(seen) > MAX_SEEN:
        del seen[next(iter(seen))]
    return first
