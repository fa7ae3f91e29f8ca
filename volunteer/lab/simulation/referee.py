"""Watches all members at once: the invariants I1 to I7 of ROUNDS.md, after every event."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from volunteer.lab.simulation.member import Member
from volunteer.lab.simulation.trainer_model import Contents, Snapshot, Unit
from volunteer.rounds import events as ev
from volunteer.rounds.chain import ChainFacts, listed_in_order
from volunteer.rounds.credit import WorkState
from volunteer.rounds.fork_choice import choose_tip, common_ancestor
from volunteer.rounds.records import Commit, Contribution, Record


class BrokenRule(AssertionError):
    """An invariant does not hold."""


@dataclass(slots=True)
class Referee:
    """What has been seen so far."""

    contents: Contents
    honest: frozenset[str]
    facts: dict[str, ChainFacts] = field(default_factory=dict)
    """Commit -> its facts, as the first member saw them (I7)."""
    finals: set[str] = field(default_factory=set)
    kept: dict[str, set[Unit]] = field(default_factory=dict)
    """Peer -> all units that were ever on its disk."""
    num_resets_conflicts: int = 0
    num_dropped: int = 0
    most_final_lag: int = 0
    final_lags: list[int] = field(default_factory=list)
    _signed: dict[tuple[str, ...], str] = field(default_factory=dict)
    _units_on_chain: dict[str, frozenset[Unit]] = field(default_factory=dict)
    _last_seen: dict[str, tuple[object, ...]] = field(default_factory=dict)
    _num_facts: dict[str, int] = field(default_factory=dict)

    # ------------------------------------------------------------------------ as it happens

    def note_saved(self, peer: str, snapshot: Snapshot) -> None:
        """Units are on a disk: from now on they must not get lost."""
        self.kept.setdefault(peer, set()).update(snapshot.open_units)
        if snapshot.last is not None:
            units = self.contents.units_of[snapshot.last.blob_id]
            self.kept[peer].update(unit for unit in units if unit.author == peer)

    def note_published(self, record_id: str, record: Record) -> None:
        """I1: one vote a height, one contribution and one proposal a commit."""
        if isinstance(record, Contribution) and record.author in self.honest:
            self._sign_once(("contribution", record.author, record.base), record_id)
            if record.vote:
                self._sign_once(("vote", record.author, str(record.round_index)), record_id)
        elif isinstance(record, Commit) and record.proposer in self.honest:
            self._sign_once(("commit", record.proposer, record.parent), record_id)

    def _sign_once(self, key: tuple[str, ...], record_id: str) -> None:
        if self._signed.setdefault(key, record_id) != record_id:
            raise BrokenRule(f"I1: signed twice: {key}")

    def note_final(self, member: Member, action: ev.Finalise) -> None:
        """I2: no two conflicting finals unless a reset lies between."""
        facts = member.machine.known.facts
        if member.me not in self.honest:
            return
        self.final_lags.append(facts[member.machine.tip or ""].height - action.round_index)
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
        if member.me not in self.honest:
            return
        raise BrokenRule(f"{member.me}: alarm, {action}")

    def units_on_chain(self, commit_id: str) -> frozenset[Unit]:
        """Return all work that the chain of `commit_id` lists."""
        return self._units_on_chain.get(commit_id, frozenset())

    # ------------------------------------------------------------------------ after an event

    def check(self, member: Member) -> None:
        """Check one honest member after something happened to it."""
        machine = member.machine
        if machine.tip is None or member.me not in self.honest:
            return
        trainer = member.trainer
        idle = trainer is not None and trainer.is_idle
        num_open = len(trainer.open_units) if trainer is not None else 0
        seen = (machine.tip, len(machine.own), len(machine.dropped), idle, num_open)
        before = self._last_seen.get(member.me, (None,))
        if before == seen:
            return
        self._last_seen[member.me] = seen
        if before[0] != machine.tip:
            self._note_facts(member)
            self._check_tip(member)
        if idle:
            self.check_books(member)

    def _note_facts(self, member: Member) -> None:
        """I7 and I3: the same facts everywhere, and no work twice on any chain."""
        facts = member.machine.known.facts
        key = f"{member.me}/{member.num_starts}"
        begin = self._num_facts.get(key, 0)
        if len(facts) == begin:
            return
        for commit_id in list(facts)[begin:]:
            if self.facts.setdefault(commit_id, facts[commit_id]) != facts[commit_id]:
                raise BrokenRule(f"I7: two members differ in the facts at {commit_id[:8]}")
            if commit_id not in self._units_on_chain:
                self._note_units(member, facts[commit_id])
        self._num_facts[key] = len(facts)

    def _note_units(self, member: Member, facts: ChainFacts) -> None:
        above = self._units_on_chain.get(facts.parent_id, frozenset())
        listed: Counter[Unit] = Counter(above)
        for contribution_id in facts.listed:
            contribution = member.machine.known.contributions[contribution_id]
            listed.update(self.contents.units_of.get(contribution.blob_id, ()))
        twice = [unit for unit, count in listed.items() if count > 1]
        if any(unit.author in self.honest for unit in twice):
            raise BrokenRule(f"I3: listed twice on the chain of {facts.commit_id[:8]}: {twice}")
        self._units_on_chain[facts.commit_id] = frozenset(listed)

    def _check_tip(self, member: Member) -> None:
        """I5: the tip is usable, and the choice that is kept is the choice of rule 17."""
        machine, known = member.machine, member.machine.known
        if machine.tip not in known.usable or machine.tip not in known.verified:
            raise BrokenRule(f"I5: {member.me} stands on a commit that is not usable")
        commit = known.commits.get(machine.tip)
        if commit is not None:
            parent = known.facts[commit.parent]
            listed = listed_in_order(commit.contributions, parent, known.contributions)
            if commit.state_hash != member.state_after(commit.parent, listed):
                raise BrokenRule(f"I5: {member.me} stands on a state that nobody else can have")
        for choice in (known.usable_choice, known.header_choice):
            start = known.rules.genesis_id
            tip_facts = known.facts[machine.tip]
            if not tip_facts.resets:
                start = tip_facts.final_id
            if choice.best(start) != choose_tip(choice.tree, start):
                raise BrokenRule(f"I5: {member.me} kept a path that is not the choice")

    def check_books(self, member: Member) -> None:
        """I4: every unit of work is in exactly one place."""
        places = self._places(member)
        wrong = {unit: places[unit] for unit in self.kept.get(member.me, ()) if places[unit] != 1}
        if wrong:
            raise BrokenRule(f"I4: {member.me} has units not in exactly one place: {wrong}")

    def _places(self, member: Member) -> Counter[Unit]:
        machine, trainer = member.machine, member.trainer
        assert trainer is not None
        own, states = machine.own, machine.work_states()
        places: Counter[Unit] = Counter(trainer.open_units)
        for carried in trainer.carried:
            places.update(self.contents.new_part(carried, own))
        tip = machine.known.facts[machine.tip or ""]
        for work_id, contribution in own.items():
            can_be_listed = contribution.base in (tip.commit_id, tip.parent_id)
            if machine.work.listed_at(work_id) is not None or can_be_listed:
                places.update(self.contents.units_of[contribution.blob_id])
            elif states[work_id] is WorkState.DROPPED:
                places.update(self.contents.new_part(work_id, own))
        last = trainer.snapshot.last
        if last is not None and last.blob_id not in {c.blob_id for c in own.values()}:
            places.update(self.contents.units_of[last.blob_id])
        return places
