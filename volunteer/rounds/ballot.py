"""One vote a height, with a lock on the highest certified commit.

Runs in: agent, simulation. Pure.

Everything here is recomputed from our own recorded votes, which are on disk before they are sent:
a member that crashes and comes back cannot vote twice (ROUNDS.md rules 14, 21, 24).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from volunteer.rounds.chain import ChainFacts
from volunteer.rounds.fork_choice import is_ancestor
from volunteer.rounds.records import Contribution


@dataclass(slots=True)
class Ballot:
    """What this member has voted for."""

    facts: Mapping[str, ChainFacts]
    lock_id: str
    """The highest certified commit on a chain that this member voted on."""
    lock_height: int = 0
    voted_height: int = -1

    def may_vote(self, base: ChainFacts) -> bool:
        """Return whether a contribution on `base` may vote for it."""
        if base.height <= self.voted_height:
            return False
        is_on_lock = is_ancestor(self.facts, self.lock_id, base.commit_id)
        return is_on_lock or base.certified_height > self.lock_height

    def note_vote(self, record: Contribution) -> None:
        """Remember an own vote that is being, or has been, recorded."""
        self.voted_height = max(self.voted_height, record.round_index)
        facts = self.facts.get(record.base)
        if facts is not None and facts.certified_height > self.lock_height:
            self.lock_height, self.lock_id = facts.certified_height, facts.certified_id
