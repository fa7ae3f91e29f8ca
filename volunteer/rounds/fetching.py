"""Asks for the records, blobs and states that a member lacks, each once at a time.

Runs in: agent, simulation. Sans-IO. What is needed is catch_up.py's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from volunteer.rounds import events as ev
from volunteer.rounds.catch_up import Needs, needs_of_headers
from volunteer.rounds.chain import ChainFacts, listed_in_order
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.requests import RECORD_AGAIN_S, Kind, Requests
from volunteer.rounds.turn import Timing

MAX_BRANCHES = 4
"""Branches looked at in one go when the files of the best cannot be had."""


@dataclass(slots=True)
class Fetching:
    """Turns needs into actions."""

    known: Knowledge
    requests: Requests
    timing: Timing
    banned: Set[str]

    def what_is_missing(
        self, tip: ChainFacts, start: str, now_s: float, *, is_contributing: bool
    ) -> list[ev.Action]:
        """Return what to ask for to propose on `tip` and to follow the best chain of headers.

        Args:
            tip: where the member stands.
            start: the commit from which branches are chosen (rule 16).
            now_s: own clock.
            is_contributing: a paused member keeps what comes, and fetches no state.
        """
        actions: list[ev.Action] = [
            ev.FetchRecord(record_id)
            for record_id in self.known.missing_records()
            if self.requests.ask(record_id, now_s, RECORD_AGAIN_S)
        ]
        for base in (tip.commit_id, tip.parent_id):
            based_on = self.known.based_on.get(base, ())
            wanted = (i for i in based_on if self.known.contributions[i].author not in self.banned)
            actions += self._blobs(sorted(wanted), now_s)
        usable = self.known.facts[self.known.usable_choice.best(start)]
        if not is_contributing and usable.height >= tip.height + self.known.rules.journal_rounds:
            return actions  # enough to go on with; after a longer pause a state is fetched
        return actions + self._headers(start, now_s, is_contributing=is_contributing)

    def _headers(self, start: str, now_s: float, *, is_contributing: bool) -> list[ev.Action]:
        """Fetch what the best chain of headers needs; if nobody has it, what the next best does.

        Who signs a commit and keeps a blob of it back must not keep everyone from all branches.
        """
        actions: list[ev.Action] = []
        self.known.pursue_again(now_s)
        for commit_id in self.known.withheld:
            actions += self._blobs(self.known.commits[commit_id].contributions, now_s)
        for _ in range(MAX_BRANCHES):
            needs = needs_of_headers(self.known, self.known.header_choice.best(start))
            actions += self._blobs(needs.contributions, now_s)
            if is_contributing:
                actions += self.state(Needs(state_of=needs.state_of), now_s)
            if not self._is_withheld(needs, now_s):
                break
            self.known.withhold(needs.lowest, now_s + self.timing.round_s)
        return actions

    def _is_withheld(self, needs: Needs, now_s: float) -> bool:
        if not needs.lowest:
            return False
        listed = self.known.commits[needs.lowest].contributions
        is_state_had = needs.state_of and not self.requests.seems_withheld(needs.state_of, now_s)
        return not is_state_had and any(
            self.requests.seems_withheld(contribution_id, now_s) for contribution_id in listed
        )

    def _blobs(self, contribution_ids: Iterable[str], now_s: float) -> list[ev.Action]:
        actions: list[ev.Action] = []
        for contribution_id in contribution_ids:
            contribution = self.known.contributions[contribution_id]
            is_settled = contribution_id in self.known.held or contribution_id in self.known.bad
            if not is_settled and self.requests.ask(contribution_id, now_s):
                actions.append(ev.FetchBlob(contribution_id, contribution))
        return actions

    def state(self, needs: Needs, now_s: float) -> list[ev.Action]:
        """Return how to get the state that `needs` names: computed, or fetched."""
        actions: list[ev.Action] = []
        if needs.compute and self.requests.begin(Kind.COMPUTE, needs.compute, now_s):
            commit = self.known.commits[needs.compute]
            parent = self.known.facts[commit.parent]
            listed = listed_in_order(commit.contributions, parent, self.known.contributions)
            actions.append(ev.ComputeState(needs.compute, commit, listed))
        wanted = needs.state_of
        if wanted and self.requests.begin(Kind.FETCH_STATE, wanted, now_s):
            actions.append(ev.FetchState(wanted, self.known.state_hash_of(wanted)))
        return actions
