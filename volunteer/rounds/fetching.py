"""Asks for the records, blobs and states that a member lacks, each once at a time.

Runs in: agent, simulation. Sans-IO. What is needed is catch_up.py's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from volunteer.rounds import events as ev
from volunteer.rounds.catch_up import CATCH_UP_HEIGHTS, Needs, Stock, needs_of_headers
from volunteer.rounds.chain import ChainFacts, listed_authors, listed_in_order
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.requests import RECORD_AGAIN_S, Kind, Requests
from volunteer.rounds.sampling import Draw
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
    state_parts: dict[str, int] = field(default_factory=dict)
    """Commit -> bytes of its state's file that an earlier fetch has left on the disk."""
    _open: dict[str, list[str]] = field(default_factory=dict)
    """Of the tip and its parent: contributions there whose blobs are neither held nor bad."""
    _looked_at: dict[str, frozenset[str]] = field(default_factory=dict)
    """Of the same: all contributions there that `_open` was found among."""
    _draw: Draw | None = None
    """Which of them a commit on the tip would list, where they are too many."""

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
        self._look_for_open(tip)
        if not self._is_left_behind():
            actions += self._blobs(self._to_fetch_ahead(now_s), now_s)
        usable = self.known.facts[self.known.usable_choice.best(start)]
        if not is_contributing and usable.height >= tip.height + self.known.rules.journal_rounds:
            return actions  # enough to go on with; after a longer pause a state is fetched
        return actions + self._headers(start, now_s, is_contributing=is_contributing)

    def _is_left_behind(self) -> bool:
        """Tell whether a state is on its way: what is here has nothing to propose or compute."""
        return self.known.rules.state_bytes > 0 and self.requests.is_busy(Kind.FETCH_STATE)

    def _look_for_open(self, tip: ChainFacts) -> None:
        """Find what is not settled at the tip; most events change nothing there."""
        known, was_open, looked_at = self.known, self._open, self._looked_at
        self._open, self._looked_at = {}, {}
        for base in (tip.commit_id, tip.parent_id):
            based_on: Set[str] = known.based_on.get(base, set())
            before = looked_at.get(base, frozenset())
            if based_on != before:
                before, was_open[base] = frozenset(based_on), sorted(based_on)
            self._looked_at[base] = before
            candidates = was_open.get(base, [])
            self._open[base] = [i for i in candidates if i not in known.held and i not in known.bad]
        self._draw_lots(tip, looked_at)

    def _draw_lots(self, tip: ChainFacts, looked_at: dict[str, frozenset[str]]) -> None:
        """Let those take part in the draw that have come, or all where the tip is another."""
        if sum(map(len, self._looked_at.values())) <= self.known.rules.max_contributions:
            self._draw = None
            return
        if self._draw is None or self._draw.seed != tip.commit_id:
            self._draw, looked_at = Draw(tip.commit_id, self.known.rules.max_contributions), {}
        authors = listed_authors(tip, self.known.contributions)
        members = tip.rosters[0] | tip.rosters[1]
        for base, ids in self._looked_at.items():
            if ids is looked_at.get(base):
                continue
            for contribution_id in ids - looked_at.get(base, frozenset()):
                author = self.known.contributions[contribution_id].author
                if (author, base) not in authors:
                    self._draw.add(contribution_id, is_first=author in members)

    def _to_fetch_ahead(self, now_s: float) -> list[str]:
        """Return the contributions that a commit on the tip may list, and whose blobs lack."""
        if self._draw is not None:
            return self._draw.chosen(lambda i: self._cannot_be_had(i, now_s))
        found = (i for open_here in self._open.values() for i in open_here)
        return [i for i in found if self.known.contributions[i].author not in self.banned]

    def _cannot_be_had(self, contribution_id: str, now_s: float) -> bool:
        """Tell whether to fetch another instead: else who keeps blobs back would fill the draw."""
        contribution = self.known.contributions.get(contribution_id)
        return (
            contribution is None
            or contribution.author in self.banned
            or contribution_id in self.known.bad
            or self.requests.seems_withheld(contribution_id, now_s)
        )

    def _headers(self, start: str, now_s: float, *, is_contributing: bool) -> list[ev.Action]:
        """Fetch what the best chain of headers needs; if nobody has it, what the next best does.

        Who signs a commit and keeps a blob of it back must not keep everyone from all branches.
        """
        actions: list[ev.Action] = []
        self.known.pursue_again(now_s)
        for commit_id in self.known.withheld:
            actions += self._blobs(self.known.commits[commit_id].contributions, now_s)
        for _ in range(MAX_BRANCHES):
            best = self.known.header_choice.best(start)
            if best in self.known.usable:
                actions += self._side_blobs(start, best, now_s)
                break
            needs = needs_of_headers(self.known, best, self._stock())
            actions += self._blobs(needs.contributions, now_s)
            if is_contributing:
                actions += self.state(Needs(state_of=needs.state_of), now_s)
            if not self._is_withheld(needs, now_s):
                break
            self.known.withhold(needs.lowest, now_s + self.timing.round_s)
        return actions

    def _side_blobs(self, start: str, best: str, now_s: float) -> list[ev.Action]:
        """Fetch what makes the headers choose otherwise than what may be stood on.

        All of their path can be stood on, so what they count lies beside it: a commit whose blobs
        are not here. It has to come, or to be set aside, or both choices would differ for ever.
        """
        actions: list[ev.Action] = []
        if self.known.usable_choice.best(start) == best:
            return actions
        for commit_id in self.known.next_to_use()[:CATCH_UP_HEIGHTS]:
            listed = self.known.commits[commit_id].contributions
            actions += self._blobs(listed, now_s)
            if any(self.requests.seems_withheld(i, now_s) for i in listed):
                self.known.withhold(commit_id, now_s + self.timing.round_s)
        return actions

    def _stock(self) -> Stock:
        parts = self.state_parts
        under_way = self.requests.under_way(Kind.FETCH_STATE)
        if under_way:  # what has been begun is gone on with
            parts = {**parts, under_way: self.known.rules.state_bytes}
        return Stock(parts, self.requests.failures_of)

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
        may_compute = needs.compute and not self._is_left_behind()
        if may_compute and self.requests.begin(Kind.COMPUTE, needs.compute, now_s):
            commit = self.known.commits[needs.compute]
            parent = self.known.facts[commit.parent]
            listed = listed_in_order(commit.contributions, parent, self.known.contributions)
            actions.append(ev.ComputeState(needs.compute, commit, listed))
        wanted = needs.state_of
        if wanted and self.requests.begin(Kind.FETCH_STATE, wanted, now_s):
            actions.append(ev.FetchState(wanted, self.known.state_hash_of(wanted)))
        return actions
