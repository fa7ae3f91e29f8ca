"""A member's own contributions, and what the chain of the tip makes of them.

Runs in: agent, simulation. The rule is credit.py's, recomputed from the chain at every move (rule
28). Only what a final commit lists is left out of that, until a switch goes below that commit: it
cannot change before, and a member that has contributed for a year has thousands of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from volunteer.rounds.chain import ChainFacts
from volunteer.rounds.credit import WorkState, pending_ids, work_states
from volunteer.rounds.fork_choice import is_ancestor
from volunteer.rounds.records import Contribution


@dataclass(slots=True)
class OwnWork:
    """Own contributions on the chain of the tip."""

    facts: Mapping[str, ChainFacts]
    listed_by: Mapping[str, set[str]]
    """Contribution -> valid commits that list it."""
    genesis_id: str
    own: dict[str, Contribution] = field(default_factory=dict)
    dropped: set[str] = field(default_factory=set)
    chain: list[str] = field(default_factory=list)
    """The tip's chain by height."""
    settled: set[str] = field(default_factory=set)
    """Own contributions that final commits of the chain list, or that those carry."""
    _settled_height: int = 0

    def stand_on(self, tip: ChainFacts) -> bool:
        """Look at all from `tip`; return whether this left the branch it was on (a switch)."""
        old = self.chain
        is_next = bool(old) and old[-1] == tip.parent_id
        if is_next:
            old.append(tip.commit_id)
        else:
            self.chain = self._chain_of(tip)
        is_switch = bool(old) and not self.is_on_chain(old[-1])
        if is_switch and not self.is_on_chain(old[self._settled_height]):
            self.settled.clear()
            self._settled_height = 0
        self._settle(tip.final_height)
        return is_switch

    def _chain_of(self, tip: ChainFacts) -> list[str]:
        chain = [tip.commit_id]
        while chain[-1] != self.genesis_id:
            chain.append(self.facts[chain[-1]].parent_id)
        return chain[::-1]

    def _settle(self, final_height: int) -> None:
        for commit_id in self.chain[self._settled_height : final_height + 1]:
            for contribution_id in self.facts[commit_id].listed:
                if contribution_id in self.own:
                    self.settled.add(contribution_id)
                    self.settled.update(self.own[contribution_id].carries)
        self._settled_height = max(self._settled_height, final_height)

    def is_on_chain(self, commit_id: str) -> bool:
        """Return whether the tip's chain contains this commit."""
        height = self.facts[commit_id].height
        return height < len(self.chain) and self.chain[height] == commit_id

    def listed_at(self, contribution_id: str) -> str | None:
        """Return the commit of the tip's chain that lists this contribution."""
        commits = self.listed_by.get(contribution_id, ())
        return next((c for c in commits if self.is_on_chain(c)), None)

    def listed_between(self, below: str, final_id: str) -> tuple[str, ...]:
        """Return own contributions listed from above `below`, or its fork, up to `final_id`."""
        listed: list[str] = []
        while not is_ancestor(self.facts, final_id, below):
            facts = self.facts[final_id]
            listed += [i for i in sorted(facts.listed) if i in self.own]
            final_id = facts.parent_id
        return tuple(listed)

    def unsettled(self) -> dict[str, Contribution]:
        """Return own contributions of which something may still change."""
        return {i: c for i, c in self.own.items() if i not in self.settled}

    def states(self, own: Mapping[str, Contribution] | None = None) -> dict[str, WorkState]:
        """Return what has become of each own contribution, or of those in `own` alone."""
        return self._states(self.own if own is None else own)

    def pending(self) -> list[str]:
        """Return what belongs into the local weights, the oldest first."""
        unsettled = self.unsettled()
        return pending_ids(self._states(unsettled), unsettled)

    def _states(self, own: Mapping[str, Contribution]) -> dict[str, WorkState]:
        return work_states(
            own,
            self.dropped,
            lambda i: self.listed_at(i) is not None,
            lambda i: self._may_be_listed(own[i].base),
        )

    def _may_be_listed(self, base: str) -> bool:
        """Return whether a descendant of the tip may still list what was made on `base` (rule 5).

        That is so for the tip and its parent, and for what lies above the tip: after a restart
        without some blobs, a member stands lower than it did.
        """
        if base in self.chain[-2:]:
            return True
        tip = self.facts[self.chain[-1]]
        facts = self.facts.get(base)
        if facts is None or facts.height <= tip.height:
            return False
        return is_ancestor(self.facts, tip.commit_id, base)
