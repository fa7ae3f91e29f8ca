"""One vote a height, with a lock on the highest certified commit.

Runs in: agent, simulation. Pure.

Everything here is recomputed from our own recorded votes, which are on disk before they are sent:
a member that crashes and comes back cannot vote twice (ROUNDS.md rules 14, 21, 24).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from volunteer.rounds.chain import ChainFacts
from volunteer.rounds.fork_choice import common_ancestor, is_ancestor
from volunteer.rounds.records import Contribution


@dataclass(slots=True)
class Ballot:
    """What this member has voted for."""

    facts: Mapping[str, ChainFacts]
    lock_id: str
    """The highest certified commit on the chain that this member voted on last."""
    lock_height: int = 0
    voted_height: int = -1

    @classmethod
    def of(
        cls, facts: Mapping[str, ChainFacts], genesis_id: str, own: Iterable[Contribution]
    ) -> Ballot:
        """Count own votes, in their order: one read back before its base gave no lock."""
        ballot = cls(facts, lock_id=genesis_id)
        for contribution in sorted(own, key=lambda c: c.round_index):
            ballot.note_vote(contribution)
        return ballot

    def may_vote(self, base: ChainFacts) -> bool:
        """Return whether a contribution on `base` may vote for it."""
        if base.height <= self.voted_height:
            return False
        if is_ancestor(self.facts, self.lock_id, base.commit_id):
            return True
        return base.certified_height > self._height_binding(base)

    def _height_binding(self, base: ChainFacts) -> int:
        """Return the height above which a chain off the lock's must be certified to be voted for.

        A lock binds as long as no reset lies between (rule 11): those who went on apart for long,
        and give way, have locks on what they gave up. If those bound them, and their branch was the
        higher one, nothing would become final ever again where their votes are needed. What was
        certified below the reset, and above the fork, still binds.
        """
        ancestor = self.facts[common_ancestor(self.facts, self.lock_id, base.commit_id)]
        node = self.facts[self.lock_id]
        if node.resets == ancestor.resets:
            return self.lock_height
        while node.resets > ancestor.resets:
            node = self.facts[node.parent_id]
        return node.certified_height if node.certified_height > ancestor.height else -1

    def note_vote(self, record: Contribution) -> None:
        """Remember an own contribution that is being, or has been, recorded, if it votes."""
        if not record.vote:
            return
        is_newest = record.round_index > self.voted_height
        self.voted_height = max(self.voted_height, record.round_index)
        facts = self.facts.get(record.base)
        if facts is None:
            return
        has_left_lock = is_newest and not is_ancestor(self.facts, self.lock_id, record.base)
        if facts.certified_height > self.lock_height or has_left_lock:
            self.lock_height, self.lock_id = facts.certified_height, facts.certified_id
