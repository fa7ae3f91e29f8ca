"""A member's own commits: one on each tip, when it is its turn.

Runs in: agent, simulation. Sans-IO. ROUNDS.md rules 22 and 23; when that is says turn.py.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field

from volunteer.rounds import events as ev
from volunteer.rounds.chain import ChainFacts, listed_in_order
from volunteer.rounds.drafts import Drafts
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import Commit
from volunteer.rounds.requests import Kind, Requests
from volunteer.rounds.sampling import sample_contributions
from volunteer.rounds.turn import (
    Timing,
    eligible_contributions,
    is_child_on_its_way,
    least_turn_delay_s,
    leavings_to_list,
    roster_votes,
    turn_delay_s,
    votes_for,
)


@dataclass(slots=True)
class Proposing:
    """Asks for proposals, and fills in the commits that come of them."""

    known: Knowledge
    requests: Requests
    timing: Timing
    drafts: Drafts
    banned: Set[str]
    parents: set[str] = field(default_factory=set)
    """Commits on which this member has proposed."""

    def ask(
        self, tip: ChainFacts, may_wait: bool, closed_at_s: float, now_s: float
    ) -> ev.ComputeProposal | None:
        """Return what to compute for a proposal on `tip`; None while it is not our turn.

        Args:
            tip: where the member stands; its state is held.
            may_wait: for what others stand on, since it has not stood there for long.
            closed_at_s: when the round there was closed for it, on its own clock.
            now_s: that clock.
        """
        if now_s < self.due_at_s(tip, closed_at_s):
            return None
        known, me = self.known, self.drafts.me
        eligible = eligible_contributions(known, tip, self.banned)
        if not eligible or now_s < closed_at_s + turn_delay_s(known, tip, self.timing, me):
            return None
        if self._is_needless(tip, may_wait):
            return None
        chosen = sample_contributions(
            eligible,
            known.rules.max_contributions,
            seed=tip.commit_id,
            first=roster_votes(known, tip, eligible),
            votes=votes_for(known, tip, eligible),
        )
        if not self.requests.begin(Kind.PROPOSE, tip.commit_id, now_s):
            return None
        return ev.ComputeProposal(tip.commit_id, listed_in_order(chosen, tip, known.contributions))

    def due_at_s(self, tip: ChainFacts, closed_at_s: float) -> float:
        """Return before when `ask` returns nothing, whatever comes; infinite: it was asked."""
        if tip.commit_id in self.parents or self.requests.is_busy(Kind.PROPOSE):
            return math.inf
        return closed_at_s + least_turn_delay_s(self.known, tip, self.timing, self.drafts.me)

    def commit(self, tip: ChainFacts, event: ev.ProposalComputed, may_wait: bool) -> Commit | None:
        """Return the commit to publish, once; None where another has arrived meanwhile."""
        if event.parent != tip.commit_id or event.parent in self.parents:
            return None
        if self._is_needless(tip, may_wait):
            return None
        self.parents.add(event.parent)
        limit = self.known.rules.max_contributions
        leaving = leavings_to_list(self.known, tip, self.drafts.me, limit=limit)
        return self.drafts.commit(tip, event, leaving)

    def _is_needless(self, tip: ChainFacts, may_wait: bool) -> bool:
        return is_child_on_its_way(self.known, tip, may_wait)
