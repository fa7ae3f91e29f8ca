"""How much of what others sign is kept, and what is forgotten for it.

Runs in: agent, simulation. Pure.

Kept without a limit: the best chain known and what it lists, as far as members made it; what this
member signed, and stands on; and proofs against those whom its chain lists. All else has room
(`waiting`, `loose_records`, `side_branches`). What there is no room for is turned away by name; it
can always come again, and what a commit lists is asked for by its id and let in.

Invariant: the facts of a commit depend on its chain alone, and nothing below a kept commit is ever
forgotten. So who forgets, and who never heard, agree about every commit that both keep (I7).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from blake3 import blake3

from volunteer.rounds.chain import ChainFacts
from volunteer.rounds.fork_choice import choose_child
from volunteer.rounds.loose_records import LooseRecords, Standing, Ticket
from volunteer.rounds.records import Commit, Contribution, Leaving
from volunteer.rounds.side_branches import MAX_SIDE_COMMITS, SIDE_SLACK, side_commits_to_forget

if TYPE_CHECKING:
    from volunteer.rounds.knowledge import Knowledge

MAX_COMMITS_PER_PROPOSER = 16
"""Of one proposer on one parent: an honest one signs one. Two are proof that it is not, but who
signs more may show each of them to others, who stand on it in good faith."""
LOTS_REMEMBERED = 4096
"""A lot is drawn again whenever a record's place is looked at anew."""
MAX_AHEAD = 8192
"""Heights by which the best chain of headers may be above what can be stood on."""
MAX_INVALID = 1024
"""Commits remembered as breaking a rule of the chain; the oldest is forgotten, and judged again."""


_NO_TICKET = Ticket("", "", "", Standing.ORPHAN, (False, 0, "", 0, ""))
_NOTHING_ASKED = (_NO_TICKET, "", (-1, -1))


@dataclass(slots=True)
class Bounds:
    """Decides for one `Knowledge` what comes in and what goes."""

    known: Knowledge
    is_loading: bool = False
    """While what is on the disk is read back: no commit is forgotten before all is known."""
    turned_away: dict[str, int] = field(default_factory=dict)
    """Sentence -> records for which there was no room."""
    num_forgotten: int = 0
    """Counts the contributions and farewells that were here and had to go."""
    loose: LooseRecords = field(init=False)
    _forgotten: dict[str, None] = field(default_factory=dict)
    """Records to take off the disk."""
    _pins: set[str] = field(default_factory=set)
    """Commits that own records and proofs stand on."""
    _proofs: set[str] = field(default_factory=set)
    _shed_above: int = MAX_SIDE_COMMITS + SIDE_SLACK
    _asked: tuple[Ticket, str, tuple[int, int]] = _NOTHING_ASKED
    """For whom `problem` was asked last, its answer, and by what best chains."""

    def __post_init__(self) -> None:
        """Begin with nothing."""
        self.loose = LooseRecords(self.known.rules.max_contributions)

    # ------------------------------------------------------------------------------ coming

    def problem(self, record_id: str, record: Commit | Contribution | Leaving) -> str:
        """Return why there is no room for a new record, as a sentence; empty if there is."""
        if isinstance(record, Commit):
            is_own = record.proposer == self.known.me
            return "" if is_own else self._commit_problem(record_id, record)
        if record.author == self.known.me:
            return ""  # what we forget having signed, we might sign differently
        waiting_for = self.known.waiting_for
        if record_id in self._proofs or (waiting_for.commits and waiting_for.needs(record_id)):
            return ""
        ticket = self._ticket(record_id, record)
        problem = self.loose.problem(ticket)
        self._asked = (ticket, problem, self._choices())
        return problem

    def _commit_problem(self, commit_id: str, commit: Commit) -> str:
        known = self.known
        if commit_id in known.invalid:
            return "it breaks a rule of the chain"
        most = known.rules.max_contributions
        if len(commit.contributions) > most or len(commit.leaving) > most:
            return "it lists more than a commit may"
        named = (commit.parent, *commit.contributions, *commit.leaving)
        if len({*named}) < len(named):
            return "it names one record twice"
        if known.waiting_for.needs(commit_id):
            return ""
        siblings = (known.commits[i] for i in known.children.get(commit.parent, ()))
        if sum(s.proposer == commit.proposer for s in siblings) >= MAX_COMMITS_PER_PROPOSER:
            return "its proposer has too many commits on that parent"
        has_turn = self.has_turn(commit)
        is_last = known.waiting_for.would_be_last(commit_id, commit.round_index, has_turn=has_turn)
        return "too many commits wait" if is_last and known.lacks_of(commit) else ""

    def has_turn(self, commit: Commit) -> bool:
        """Return whether a member of the best chain proposes on it."""
        facts = self.known.facts.get(commit.parent)
        if facts is None or not _is_at(self.known.header_choice.current(), facts):
            return False
        return any(commit.proposer in roster for roster in facts.rosters)

    def take_in(self, record_id: str, record: Contribution | Leaving) -> None:
        """Seat a record that has just been put among those known, where it needs a seat."""
        known = self.known
        if record.author == known.me:
            self._pins.add(record.base)
            return
        is_accounted = record_id in known.listed_by or known.waiting_for.needs(record_id)
        if is_accounted or record_id in self._proofs:
            return
        ticket, problem, choices = self._asked
        if ticket.record_id != record_id or choices != self._choices():
            ticket = self._ticket(record_id, record)
            problem = self.loose.problem(ticket)
        self._asked = _NOTHING_ASKED
        victim = record_id if problem else self.loose.seat(ticket)
        if victim is not None:
            self.count(problem or ticket.standing.value)
            self.forget_record(victim)

    def _choices(self) -> tuple[int, int]:
        """Return what says whether the best chains are still those that a ticket was made by."""
        known = self.known
        known.header_choice.current()
        return known.header_choice.version, known.usable_choice.version

    def keep_proof(self, author: str, record_ids: Iterable[str]) -> None:
        """Two records prove `author` dishonest: keep them for good, if the chain knows it.

        Of an identity that did no work, nothing is kept: the next one costs nothing.
        """
        chain_end = self.known.facts[self.known.usable_choice.current()[-1]]
        if author not in chain_end.times_listed:
            return
        for record_id in record_ids:
            self._proofs.add(record_id)
            self.loose.leave(record_id)
            record = self.known.record(record_id)
            if record is not None:
                self._pins.add(record_id if isinstance(record, Commit) else record.base)

    def pin(self, commit_id: str) -> None:
        """Keep a commit, if it is here, and all below it."""
        self._pins.add(commit_id)

    # ------------------------------------------------------------------------------- going

    def count(self, problem: str) -> None:
        """One more record was turned away, or forgotten, for this reason."""
        self.turned_away[problem] = self.turned_away.get(problem, 0) + 1

    def turn_away(self, record_id: str, problem: str) -> None:
        """Count a record that is not taken in; if the disk has it already, it goes."""
        self.count(problem)
        self._forgotten[record_id] = None

    def take_forgotten(self) -> list[str]:
        """Return what has been forgotten since the last call: the disk may forget it as well."""
        if not self._forgotten:
            return []
        known = self.known
        forgotten = [i for i in self._forgotten if i in known.invalid or not known.has_record(i)]
        self._forgotten.clear()
        return forgotten

    def note_invalid(self, commit_id: str, commit: Commit) -> None:
        """A commit breaks a rule: nobody needs it again, nor what only it listed."""
        if commit.proposer != self.known.me:
            self._forgotten[commit_id] = None
        self.settle_again((*commit.contributions, *commit.leaving))
        while len(self.known.invalid) > MAX_INVALID:
            del self.known.invalid[next(iter(self.known.invalid))]

    def forget_record(self, record_id: str) -> None:
        """Forget a contribution or farewell that no commit lists."""
        known = self.known
        self.num_forgotten += 1
        self.loose.leave(record_id)
        record = known.contributions.pop(record_id, None)
        known.leavings.pop(record_id, None)
        known.held.discard(record_id)
        known.bad.pop(record_id, None)
        self._forgotten[record_id] = None
        if record is None:
            return
        left = known.based_on[record.base]
        left.discard(record_id)
        known.note_change_on(record.base)
        if not any(known.contributions[i].author == record.author for i in left):
            self._forget_supporter(record)
        if not left:
            del known.based_on[record.base], known.changes_on[record.base]

    def _forget_supporter(self, record: Contribution) -> None:
        facts = self.known.facts.get(record.base)
        # A choice that a roster's member has a part in must not turn over because we forget.
        is_counted = facts is not None and any(record.author in r for r in facts.rosters)
        supporters = self.known.supporters.get(record.base)
        if supporters is not None and not is_counted:
            supporters.discard(record.author)
            if not supporters:
                del self.known.supporters[record.base]

    def settle_again(self, record_ids: Iterable[str]) -> None:
        """What these records were kept for may be gone, or is known by now: look at each anew."""
        known = self.known
        for record_id in record_ids:
            self.loose.leave(record_id)
            record = known.contributions.get(record_id) or known.leavings.get(record_id)
            if record is not None:
                self.take_in(record_id, record)

    def shed(self) -> None:
        """Forget commits beside the best chain when they are too many, and too many that wait."""
        known = self.known
        waiting_for = known.waiting_for
        while waiting_for.commits and (last := waiting_for.overflow()) is not None:
            commit = known.waiting_for.remove(last)
            self.turn_away(last, "too many commits wait")
            self.settle_again((*commit.contributions, *commit.leaving))
        num_facts = len(known.facts)
        if self.is_loading or num_facts <= self._shed_above:
            return
        if num_facts - self._num_usable_on_chain() <= self._shed_above:
            return
        chain = self._chain_to_keep()
        pinned, rival = self._pinned({*chain}), self._founding_rival(chain)
        num_before = len(known.facts)
        for commit_id in side_commits_to_forget(
            known.facts, known.supporters, chain, pinned, rival
        ):
            self.count("too many commits beside the chain")
            self._forget_commit(commit_id)
        if len(known.facts) < num_before:
            known.header_choice.note_removed()  # it may have gone on through what is forgotten
        left = max(MAX_SIDE_COMMITS, len(known.facts) - self._num_usable_on_chain())
        self._shed_above = left + max(SIDE_SLACK, left // 8)

    def _num_usable_on_chain(self) -> int:
        """Return how many commits of the best chain, from the genesis on, can be stood on."""
        chain = self.known.header_choice.current()
        usable = self.known.usable_choice.current()
        height = min(len(chain), len(usable)) - 1
        while chain[height] != usable[height]:
            height -= 1
        return height + 1

    def _chain_to_keep(self) -> list[str]:
        """Return the part of the best chain of headers that is kept without counting.

        A stranger can sign a chain of any length on our tip, and until the next commit of a member
        that is the best one. It shows where its rosters are reset to people of whom none was a
        member before. What comes above that is counted among what lies beside the chain, until we
        stand there; and no chain goes too far ahead of where we stand.
        """
        known = self.known
        chain = known.header_choice.current()
        start = self._num_usable_on_chain()
        for height in range(start, min(len(chain), start + MAX_AHEAD)):
            above, below = known.facts[chain[height]], known.facts[chain[height - 1]]
            is_reset = above.resets > below.resets and bool(below.rosters[1])
            if is_reset and not above.rosters[1] & (below.rosters[0] | below.rosters[1]):
                return chain[:height]
        return chain[: start + MAX_AHEAD]

    def _founding_rival(self, chain: list[str]) -> str | None:
        """Return the first commit of an open run that would be chosen if ours were not there."""
        known = self.known
        if known.facts[chain[0]].rosters[1] or len(chain) < 2:
            return None
        others = replace(known.headers, may_stand_on=lambda i: self._is_rival(i, chain[1]))
        return choose_child(others, chain[0])

    def _is_rival(self, commit_id: str, first: str) -> bool:
        return commit_id != first and commit_id not in self.known.refused

    def _pinned(self, chain: set[str]) -> set[str]:
        known = self.known
        roots = {*known.pins(), *known.usable_choice.current(), *known.states, *self._pins}
        pinned: set[str] = set()
        for root in roots & known.facts.keys():
            node = root
            while node not in pinned and node not in chain:
                pinned.add(node)
                node = known.facts[node].parent_id
        return pinned

    def _forget_commit(self, commit_id: str) -> None:
        """Forget a commit that nothing builds on, and what only it has a use for."""
        known = self.known
        facts, commit = known.facts.pop(commit_id), known.commits.pop(commit_id)
        siblings = known.children[facts.parent_id]
        siblings.remove(commit_id)
        if not siblings:
            del known.children[facts.parent_id]
        known.children.pop(commit_id, None)
        for index in (known.usable, known.verified, known.closed, known.states):
            index.discard(commit_id)
        known.drop_unusable(commit_id)
        known.refused.pop(commit_id, None)
        known.withheld.pop(commit_id, None)
        known.supporters.pop(commit_id, None)
        self._forgotten[commit_id] = None
        listed = (*commit.contributions, *commit.leaving)
        for record_id in listed:
            listing = known.listed_by[record_id]
            listing.discard(commit_id)
            if not listing:
                del known.listed_by[record_id]
        for record_id in self.loose.on(commit_id):
            self.forget_record(record_id)
        self.settle_again(i for i in listed if i not in known.listed_by)

    # ----------------------------------------------------------------------------- looking

    def _ticket(self, record_id: str, record: Contribution | Leaving) -> Ticket:
        base, author = record.base, record.author
        lot = _lot(self.known.salt, base, author)
        facts = self.known.facts.get(base)
        if facts is None:
            place = (False, 0, "", -lot, record_id)
            return Ticket(record_id, author, base, Standing.ORPHAN, place)
        # As it was last asked for: while records are read back there is none, and it is not needed.
        is_ours = _is_at(self.known.usable_choice.path, facts)
        place = (is_ours, facts.height, base, -lot, record_id)
        return Ticket(record_id, author, base, self._standing(facts, author), place)

    def _standing(self, facts: ChainFacts, author: str) -> Standing:
        """Return what the best chain says of an author, where the base's branch leaves it."""
        chain = self.known.header_choice.current()
        while not _is_at(chain, facts):
            facts = self.known.facts[facts.parent_id]
        if author in facts.rosters[0] or author in facts.rosters[1]:
            return Standing.MEMBER
        return Standing.LISTED if author in facts.times_listed else Standing.NEWCOMER


@functools.lru_cache(LOTS_REMEMBERED)
def _lot(salt: str, base: str, author: str) -> int:
    return int.from_bytes(blake3(f"{salt}/{base}/{author}".encode()).digest(8))


def _is_at(chain: list[str], facts: ChainFacts) -> bool:
    return facts.height < len(chain) and chain[facts.height] == facts.commit_id
