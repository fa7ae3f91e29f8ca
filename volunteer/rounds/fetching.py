"""Asks for the records, blobs and states that a member lacks, each once at a time.

Runs in: agent, simulation. Sans-IO. What is needed is catch_up.py's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from volunteer.rounds import events as ev
from volunteer.rounds.catch_up import CATCH_UP_HEIGHTS, Needs, Stock, needs_of_headers
from volunteer.rounds.chain import ChainFacts, excluded_at, listed_authors, listed_in_order
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.requests import RECORD_AGAIN_S, Kind, Requests
from volunteer.rounds.sampling import Draw
from volunteer.rounds.turn import Timing

MAX_BRANCHES = 4
"""Branches looked at in one go when the files of the best cannot be had."""
_NOTHING: frozenset[str] = frozenset()


@dataclass(slots=True)
class Fetching:
    """Turns needs into actions."""

    known: Knowledge
    requests: Requests
    timing: Timing
    banned: Set[str]
    state_parts: dict[str, int] = field(default_factory=dict)
    """Commit -> bytes of its state's file that an earlier fetch has left on the disk."""
    has_set_aside: bool = False
    """Whether `what_is_missing` has just given a commit up for a while."""
    _looked_at: dict[str, frozenset[str]] = field(default_factory=dict)
    """Of the tip and its parent: the contributions there, when they were looked at last."""
    _looked_when: tuple[str, int, int, int] = ("", 0, 0, 0)
    """The tip then, what `changes_on` said of the two, and how many were banned."""
    _draw: Draw | None = None
    """Which of them a commit on the tip would list, where they are too many."""
    _authors: set[tuple[str, str]] = field(default_factory=set)
    """(author, base) of what the tip lists: its child may not list these again."""
    _ahead: list[str] = field(default_factory=list)
    """Those of which a commit on the tip would list, and whose blobs were not asked for yet."""
    _ahead_when: tuple[object, object] = ((), ())
    """All that `_ahead` follows from: of the two bases, and besides."""
    _ahead_draw: Draw | None = None

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
        self.has_set_aside = False
        actions: list[ev.Action] = []
        if self.known.waiting_for.commits:
            actions += [
                ev.FetchRecord(record_id)
                for record_id in self.known.missing_records()
                if self.requests.ask(record_id, now_s, RECORD_AGAIN_S)
            ]
        self._look_at_tip(tip)
        if not self._is_left_behind():
            actions += self._blobs(self._to_fetch_ahead(now_s), now_s)
        if not is_contributing:
            usable = self.known.facts[self.known.usable_choice.best(start)]
            if usable.height >= tip.height + self.known.rules.journal_rounds:
                return actions  # enough to go on with; after a longer pause a state is fetched
        return actions + self._headers(start, now_s, is_contributing=is_contributing)

    def take_file(self, event: ev.Event) -> None:
        """Take in what has become of a blob or a state."""
        match event:
            case ev.BlobRefused(contribution_id, reason):
                self.known.refuse_contribution(contribution_id, reason)
            case ev.StateHeld(commit_id):
                self.requests.end_state(commit_id)
                self.known.hold_state(commit_id)
            case ev.StateRefused(commit_id, reason):
                self.requests.end_state(commit_id)
                self.known.refuse(commit_id, reason)
            case ev.StateDropped(commit_id):
                self.known.states.discard(commit_id)
            case _:
                assert isinstance(event, ev.StatePartHeld), event
                self.state_parts[event.commit_id] = event.num_bytes

    def _is_left_behind(self) -> bool:
        """Tell whether a state is on its way: what is here has nothing to propose or compute."""
        return self.known.rules.state_bytes > 0 and self.requests.is_busy(Kind.FETCH_STATE)

    def _look_at_tip(self, tip: ChainFacts) -> None:
        """Find what was made on the tip and its parent; most events change nothing there."""
        known = self.known
        changes = known.changes_on
        tip_id, num_banned = tip.commit_id, len(self.banned)
        now = (tip_id, changes.get(tip_id, 0), changes.get(tip.parent_id, 0), num_banned)
        if now == self._looked_when:
            return
        if num_banned != self._looked_when[3]:
            self._draw = None  # the others are drawn anew
        before, then = self._looked_at, self._looked_when
        self._looked_at, self._looked_when = {}, now
        for place, base in ((1, tip.commit_id), (2, tip.parent_id)):
            here, was_here = known.based_on.get(base, _NOTHING), before.get(base, _NOTHING)
            is_same = tip_id == then[0] and now[place] == then[place]
            self._looked_at[base] = was_here if is_same or here == was_here else frozenset(here)
        self._draw_lots(tip, before)

    def _draw_lots(self, tip: ChainFacts, looked_at: dict[str, frozenset[str]]) -> None:
        """Let those take part in the draw that have come, or all where the tip is another."""
        if sum(map(len, self._looked_at.values())) <= self.known.rules.max_contributions:
            self._draw = None
            return
        known = self.known
        if self._draw is None or self._draw.seed != tip.commit_id:
            self._authors = listed_authors(tip, known.contributions)
            self._draw, looked_at = Draw(tip.commit_id, self.known.rules.max_contributions), {}
        members, shunned = tip.rosters[0] | tip.rosters[1], self._shunned(tip)
        for base, ids in self._looked_at.items():
            if ids is looked_at.get(base):
                continue
            for contribution_id in ids - looked_at.get(base, frozenset()):
                record = known.contributions[contribution_id]
                if (record.author, base) not in self._authors and record.author not in shunned:
                    is_vote = record.vote and base == tip.commit_id
                    is_first = record.author in members
                    self._draw.add(contribution_id, is_first=is_first, is_vote=is_vote)

    def _shunned(self, tip: ChainFacts) -> Set[str]:
        return self.banned | excluded_at(tip)

    def _to_fetch_ahead(self, now_s: float) -> list[str]:
        """Return the contributions that a commit on the tip may list, and whose blobs lack."""
        known, requests = self.known, self.requests
        draw = self._draw
        withheld = requests.all_withheld(now_s) if draw is not None else _NOTHING
        rest = (requests.num_failed, len(known.bad), known.bounds.num_forgotten, withheld)
        if (self._looked_when, rest) != self._ahead_when:
            # The same draw, and nothing gone: what came and was not drawn changes nothing.
            is_same = draw is self._ahead_draw and draw is not None and not draw.has_changed
            if not is_same or rest != self._ahead_when[1]:
                self._ahead = self._find_ahead(withheld)
            self._ahead_when, self._ahead_draw = (self._looked_when, rest), draw
        if self._ahead:
            held, bad, asked = known.held, known.bad, requests.asked_at_s
            self._ahead = [
                i for i in self._ahead if i not in asked and i not in held and i not in bad
            ]
        return self._ahead

    def _find_ahead(self, withheld: frozenset[str]) -> list[str]:
        contributions, bad = self.known.contributions, self.known.bad
        if self._draw is None:
            shunned = self._shunned(self.known.facts[self._looked_when[0]])
            found = (i for base in self._looked_at for i in sorted(self._looked_at[base]))
            return [i for i in found if contributions[i].author not in shunned]
        # Another one takes the place of what cannot be had: else who keeps blobs back would fill
        # the draw.
        ids = self._draw.ids
        out = ids - contributions.keys()
        if bad:
            out |= ids & bad.keys()
        if withheld:
            out |= ids & withheld
        return self._draw.chosen(out)

    def _headers(self, start: str, now_s: float, *, is_contributing: bool) -> list[ev.Action]:
        """Fetch what the best chain of headers needs; if nobody has it, what the next best does.

        Who signs a commit and keeps a blob of it back must not keep everyone from all branches.
        """
        actions: list[ev.Action] = []
        if self.known.withheld:
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
            self._set_aside(needs.lowest, now_s)
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
                self._set_aside(commit_id, now_s)
        return actions

    def _set_aside(self, commit_id: str, now_s: float) -> None:
        until_s = now_s + self.timing.round_s
        self.known.withhold(commit_id, until_s)
        self.requests.note_due(until_s)
        self.has_set_aside = True

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
        held, bad, asked = self.known.held, self.known.bad, self.requests.asked_at_s
        for contribution_id in contribution_ids:
            if contribution_id in held or contribution_id in bad or contribution_id in asked:
                continue
            if self.requests.ask(contribution_id, now_s):
                contribution = self.known.contributions[contribution_id]
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
