"""Watches all members at once: the invariants I1 to I7 of ROUNDS.md, after every event.

Runs in: simulation. It keeps a truth of its own: what the state after each commit is, and which
units of work each chain lists. The books of one member (I4, credit) are in `books.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from volunteer.lab.simulation.books import Books
from volunteer.lab.simulation.errors import BrokenRule
from volunteer.lab.simulation.files import state_after
from volunteer.lab.simulation.trainer_model import Contents, Snapshot, Unit
from volunteer.rounds import events as ev
from volunteer.rounds.chain import ChainFacts, excluded_at, listed_in_order, rank_order
from volunteer.rounds.fork_choice import choose_tip, common_ancestor
from volunteer.rounds.records import Commit, Contribution, Record

if TYPE_CHECKING:
    from volunteer.lab.simulation.member import Member

WHOLE_WALK_EVERY = 4
"""So many moves of a member after each other the choice is checked from its final commit on; then
from where rule 16 begins, which with a reset is the genesis."""


@dataclass(slots=True)
class Referee:
    """What has been seen so far."""

    contents: Contents
    honest: frozenset[str]
    genesis_id: str
    facts: dict[str, ChainFacts] = field(default_factory=dict)
    """Commit -> its facts, as the first member saw them (I7)."""
    finals: set[str] = field(default_factory=set)
    books: Books = field(init=False)
    num_resets_conflicts: int = 0
    most_final_lag: int = 0
    final_lags: list[int] = field(default_factory=list)
    num_bans: int = 0
    excluded: set[str] = field(default_factory=set)
    """Whom a chain that an honest member stood on has excluded for bad work."""
    struck: set[str] = field(default_factory=set)
    """Honest members that had a strike there."""
    _signed: dict[tuple[str, ...], str] = field(default_factory=dict)
    _units_on_chain: dict[str, frozenset[Unit]] = field(default_factory=dict)
    _state_of: dict[str, str] = field(default_factory=dict)
    """Commit -> the state that applying its chain gives."""
    _last_seen: dict[str, tuple[object, ...]] = field(default_factory=dict)
    _num_facts: dict[str, int] = field(default_factory=dict)
    _num_moves: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        """Begin with the genesis."""
        self.books = Books(self.contents, self.honest)
        self._state_of[self.genesis_id] = ""

    @property
    def kept(self) -> dict[str, set[Unit]]:
        """Peer -> all units that were ever on its disk and may not get lost."""
        return self.books.kept

    # ------------------------------------------------------------------------ as it happens

    def note_saved(self, peer: str, snapshot: Snapshot) -> None:
        """Units are on a disk: from now on they must not get lost."""
        self.books.note_saved(peer, snapshot)

    def note_disk_lost(self, peer: str) -> None:
        """What was on that disk is gone; what was signed with its key still binds."""
        self.books.note_disk_lost(peer)

    def note_published(self, record_id: str, record: Record) -> None:
        """I1: one vote a height, one contribution and one proposal a commit."""
        if isinstance(record, Contribution) and record.author in self.honest:
            self._sign_once(("contribution", record.author, record.base), record_id)
            if record.vote:
                self._sign_once(("vote", record.author, str(record.round_index)), record_id)
            self.books.check_declared(record)
        elif isinstance(record, Commit) and record.proposer in self.honest:
            self._sign_once(("commit", record.proposer, record.parent), record_id)

    def _sign_once(self, key: tuple[str, ...], record_id: str) -> None:
        if self._signed.setdefault(key, record_id) != record_id:
            raise BrokenRule(f"I1: signed twice: {key}")

    def note_final(self, member: Member, action: ev.Finalise) -> None:
        """I2: no two conflicting finals unless a reset lies between. No credit from nowhere."""
        if member.me not in self.honest:
            return
        facts = member.machine.known.facts
        self.final_lags.append(facts[member.machine.tip or ""].height - action.round_index)
        self.books.note_final(member, action)
        if action.commit_id in self.finals:
            return
        self._note_facts(member)
        for other in self.finals:
            ancestor = common_ancestor(self.facts, other, action.commit_id)
            if ancestor in (other, action.commit_id):
                continue
            resets = self.facts[ancestor].resets
            both = (self.facts[other].resets, self.facts[action.commit_id].resets)
            if both == (resets, resets):
                raise BrokenRule(f"I2: {other[:8]} and {action.commit_id[:8]} are both final")
            self.num_resets_conflicts += 1
        self.finals.add(action.commit_id)

    def note_alarm(self, member: Member, action: ev.RaiseAlarm) -> None:
        """Rule 18: no honest member may come to that while less than the quorum lies."""
        if member.me in self.honest:
            raise BrokenRule(f"{member.me}: alarm, {action}")

    def note_ban(self, member: Member, action: ev.BanPeer) -> None:
        """Rule 26: only who has signed two things is banned."""
        if member.me in self.honest and action.peer in self.honest:
            raise BrokenRule(f"I1: {member.me} has banned {action.peer}: {action.reason}")
        self.num_bans += 1

    def units_on_chain(self, commit_id: str) -> frozenset[Unit]:
        """Return all work that the chain of `commit_id` lists."""
        return self._units_on_chain.get(commit_id, frozenset())

    # ------------------------------------------------------------------------ after an event

    def check(self, member: Member) -> None:
        """Check one honest member after something happened to it."""
        machine = member.machine
        tip = machine.tip
        if tip is None or member.me not in self.honest:
            return
        trainer = member.trainer
        idle = trainer is not None and trainer.is_idle
        work = machine.work
        seen = (tip, len(work.own), len(work.dropped), idle, member.num_starts)
        before = self._last_seen.get(member.me, (None,))
        if before == seen:
            return
        self._last_seen[member.me] = seen
        if before[0] != tip:
            self._note_facts(member)
            self._check_tip(member, tip)
        if idle:
            self.books.check(member)

    def check_at_end(self, member: Member) -> None:
        """Check all that a member has ever done.

        Of one that stands nowhere, since it has just restarted and fetches a state, that cannot be
        said: what may still be listed depends on where it stands.
        """
        if member.machine.tip is None or member.me not in self.honest:
            return
        if member.trainer is not None and member.trainer.is_idle:
            self.books.check_all(member)

    def _note_facts(self, member: Member) -> None:
        """I7 and I3: the same facts everywhere, and no work twice on any chain."""
        facts = member.machine.known.facts
        key = f"{member.me}/{member.num_starts}"
        begin = self._num_facts.get(key, 0)
        if len(facts) == begin:
            return
        for commit_id in itertools.islice(facts, begin, None):
            shared = self.facts.setdefault(commit_id, facts[commit_id])
            if shared is not facts[commit_id]:
                if shared != facts[commit_id]:
                    raise BrokenRule(f"I7: two members differ in the facts at {commit_id[:8]}")
                # Found by each for itself, kept once: they name every peer, at every commit.
                facts[commit_id] = shared
            if commit_id not in self._units_on_chain:
                self._note_commit(member, facts[commit_id])
        self._num_facts[key] = len(facts)

    def _note_commit(self, member: Member, facts: ChainFacts) -> None:
        """Note which work the chain lists with it, and what state it truly leads to."""
        known = member.machine.known
        above = self._units_on_chain.get(facts.parent_id, frozenset())
        listed: set[Unit] = set()
        twice: set[Unit] = set()
        for contribution_id in facts.listed:
            blob_id = known.contributions[contribution_id].blob_id
            units = self.contents.units_of.get(blob_id, frozenset())
            twice |= units & above | units & listed
            listed |= units
        if any(unit.author in self.honest for unit in twice):
            raise BrokenRule(f"I3: listed twice on the chain of {facts.commit_id[:8]}: {twice}")
        self._units_on_chain[facts.commit_id] = above | listed
        if facts.parent_id:
            commit, parent = known.commits[facts.commit_id], known.facts[facts.parent_id]
            in_order = listed_in_order(commit.contributions, parent, known.contributions)
            self._state_of[facts.commit_id] = state_after(self._state_of[facts.parent_id], in_order)

    def _check_tip(self, member: Member, tip: str) -> None:
        """I5: the tip is usable, its state is the one, and the choice is that of rule 17."""
        known = member.machine.known
        if tip not in known.usable or tip not in known.verified:
            raise BrokenRule(f"I5: {member.me} stands on a commit that is not usable")
        state = member.disk.states.get(tip)
        if state != self._state_of[tip]:
            raise BrokenRule(f"{member.me} stands on another state of {tip[:8]} than the others")
        self._check_excluded(member, known.facts[tip])
        commit = known.commits.get(tip)
        if commit is not None and commit.state_hash != state:
            raise BrokenRule(f"I5: {member.me} stands on a commit that states another hash")
        final_id = known.facts[tip].final_id
        start = known.rules.genesis_id if known.facts[tip].resets else final_id
        self._num_moves[member.me] += 1
        is_whole = self._num_moves[member.me] % WHOLE_WALK_EVERY == 0
        for choice in (known.usable_choice, known.header_choice):
            best = choice.best(start)
            # Below a final commit that it leads through, the path was looked at when it was new.
            is_through = not is_whole and final_id in choice.path
            if best != choose_tip(choice.tree, final_id if is_through else start):
                raise BrokenRule(f"I5: {member.me} kept a path that is not the choice")

    def _check_excluded(self, member: Member, facts: ChainFacts) -> None:
        """Of honest work at most one piece seems bad by chance; who is excluded has no say."""
        self.struck |= self.honest.intersection(facts.strikes.marks)
        out = excluded_at(facts)
        if not out:
            return
        if out & self.honest:
            raise BrokenRule(f"{member.me} stands where honest members are excluded: {out}")
        if out.intersection(rank_order(member.rules, facts)):
            raise BrokenRule(f"who is excluded has a turn after {facts.commit_id[:8]}")
        if facts.rosters_since == facts.height and out & facts.rosters[1]:
            raise BrokenRule(f"who is excluded is in the new roster of {facts.commit_id[:8]}")
        self.excluded |= out
