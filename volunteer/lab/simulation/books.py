"""The books of every honest member: no unit of work is lost or counted twice, no credit is made up.

Runs in: simulation. Invariant I4 of ROUNDS.md, and that what the swarm confirms was trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from volunteer.lab.simulation.errors import BrokenRule
from volunteer.lab.simulation.trainer_model import Contents, Snapshot, Unit
from volunteer.rounds import events as ev
from volunteer.rounds.chain import ChainFacts
from volunteer.rounds.credit import WorkState, new_tokens
from volunteer.rounds.fork_choice import is_ancestor
from volunteer.rounds.records import Contribution

if TYPE_CHECKING:
    from volunteer.lab.simulation.member import Member

LATE_WINDOW = 1
"""Heights above its base at which a contribution can be listed beyond the next one (rule 5)."""


@dataclass(slots=True)
class Books:
    """What was trained, and what was confirmed."""

    contents: Contents
    honest: frozenset[str]
    kept: dict[str, set[Unit]] = field(default_factory=dict)
    """Peer -> all units that were ever on the disk that it has now."""
    _settled: dict[str, tuple[frozenset[str], set[Unit]]] = field(default_factory=dict)
    """Peer -> which of its contributions final commits list, and the units in them."""
    _lost: dict[str, set[Unit]] = field(default_factory=dict)
    """Peer -> units that were on disks that it has lost."""
    _confirmed: dict[str, set[str]] = field(default_factory=dict)
    """Peer -> own contributions that a final commit lists, or that those carry."""

    def note_saved(self, peer: str, snapshot: Snapshot) -> None:
        """Units are on a disk: from now on they must not get lost."""
        kept = self.kept.setdefault(peer, set())
        kept.update(snapshot.open_units)
        if snapshot.last is not None:
            units = self.contents.units_of[snapshot.last.blob_id]
            kept.update(unit for unit in units if unit.author == peer)

    def note_disk_lost(self, peer: str) -> None:
        """Whatever was on that disk may be lost; some of it may still be listed."""
        self._lost.setdefault(peer, set()).update(self.kept.pop(peer, ()))

    def check_declared(self, record: Contribution) -> None:
        """An honest member declares what it has trained, neither more nor less."""
        trained = sum(unit.tokens for unit in self.contents.units_of[record.blob_id])
        if record.tokens != trained:
            raise BrokenRule(f"credit: {record.author} declares {record.tokens} of {trained}")

    def note_final(self, member: Member, action: ev.Finalise) -> None:
        """What is confirmed to a member is at most what it has trained."""
        own = member.machine.own
        confirmed = self._confirmed.setdefault(member.me, set())
        for contribution_id in action.own_listed:
            confirmed.add(contribution_id)
            confirmed.update(own[contribution_id].carries)
        new = new_tokens(own)
        credit = sum(new.get(contribution_id, 0) for contribution_id in confirmed)
        trained = self.trained_tokens(member.me)
        if credit > trained:
            raise BrokenRule(f"credit: {credit} tokens confirmed to {member.me} of {trained}")

    def trained_tokens(self, peer: str) -> int:
        """Return what a member has trained and kept, on all the disks that it has had."""
        units = self.kept.get(peer, set()) | self._lost.get(peer, set())
        return sum(unit.tokens for unit in units)

    def check(self, member: Member) -> None:
        """I4: every unit of work is in exactly one place.

        What final commits list is in its place for good, or until a switch goes below them: of
        that, only that none of it is anywhere else. `check_all` looks at everything.
        """
        unsettled = member.machine.work.unsettled()
        settled = self._settled_units(member)
        places = self._places(member, unsettled)
        wrong = {unit: places[unit] for unit in places.keys() & settled}
        open_units = self.kept.get(member.me, set()) - settled
        wrong |= {unit: places[unit] for unit in open_units if places[unit] != 1}
        if wrong:
            raise BrokenRule(f"I4: {member.me} has units not in exactly one place: {wrong}")

    def check_all(self, member: Member) -> None:
        """I4 for all that a member has ever done."""
        places = self._places(member, member.machine.own)
        wrong = {unit: places[unit] for unit in self.kept.get(member.me, ()) if places[unit] != 1}
        if wrong:
            raise BrokenRule(f"I4: {member.me} has units not in exactly one place: {wrong}")

    def _settled_units(self, member: Member) -> set[Unit]:
        own, settled = member.machine.own, member.machine.work.settled
        before, units = self._settled.get(member.me, (frozenset(), set()))
        if not before <= settled:
            before, units = frozenset(), set()
        for work_id in settled - before:
            # What one of these only carries may hold more than the new part that was carried.
            if work_id in own and member.machine.work.listed_at(work_id) is not None:
                units |= self.contents.units_of[own[work_id].blob_id]
        if len(before) != len(settled):
            self._settled[member.me] = (frozenset(settled), units)
        return units

    def _places(self, member: Member, own: Mapping[str, Contribution]) -> Counter[Unit]:
        """Count where each unit is, as far as it is in `own` or with the trainer."""
        machine, trainer = member.machine, member.trainer
        assert trainer is not None
        states = machine.work.states(own)
        places: Counter[Unit] = Counter(trainer.open_units)
        for carried in trainer.carried:
            places.update(self.contents.new_part(carried, machine.own))
        places.update(self._in_flight(member, own))
        for work_id, contribution in own.items():
            if machine.work.listed_at(work_id) is not None:
                places.update(self.contents.units_of[contribution.blob_id])
            elif states[work_id] is WorkState.DROPPED:
                places.update(self.contents.new_part(work_id, machine.own))
        last = trainer.snapshot.last
        if last is not None and all(last.blob_id != c.blob_id for c in machine.own.values()):
            places.update(self.contents.units_of[last.blob_id])
        return places

    def _in_flight(self, member: Member, own: Mapping[str, Contribution]) -> Counter[Unit]:
        """Count how often each unit is in what a descendant of the tip may list.

        Of two contributions that no chain can list together, a unit may be in both: a member that
        stands below its own work has in flight what it carried further up, and what carries it.
        """
        assert member.trainer is not None
        facts, work = member.machine.known.facts, member.machine.work
        tip = facts[member.machine.tip or ""]
        flying, is_any_above = [], False
        for work_id, contribution in own.items():
            if work.listed_at(work_id) is not None:
                continue
            is_next = contribution.base in (tip.commit_id, tip.parent_id)
            is_above = not is_next and _is_above(facts, contribution.base, tip)
            if is_next or (is_above and work_id not in member.trainer.carried):
                flying.append(work_id)
                is_any_above |= is_above
        counts: Counter[Unit] = Counter()
        holders: dict[Unit, list[str]] = {}
        for work_id in flying:
            for unit in self.contents.units_of[own[work_id].blob_id]:
                others = holders.setdefault(unit, []) if is_any_above else []
                is_first = not others
                if is_first or any(_may_share_a_chain(facts, own, i, work_id) for i in others):
                    counts[unit] += 1
                others.append(work_id)
        return counts


def _is_above(facts: Mapping[str, ChainFacts], base: str, tip: ChainFacts) -> bool:
    """Return whether what was made on `base` is in flight since that lies above the tip.

    A member that has lost files stands lower than it did. It may not have heard yet that its
    trainer need not carry such work; the caller sees to that.
    """
    above = facts.get(base)
    return (
        above is not None and above.height > tip.height and is_ancestor(facts, tip.commit_id, base)
    )


def _may_share_a_chain(
    facts: Mapping[str, ChainFacts], own: Mapping[str, Contribution], one: str, other: str
) -> bool:
    """Return whether a chain can list both, by rule 5: then no unit may be in both."""
    lower, upper = sorted((one, other), key=lambda i: facts[own[i].base].height)
    base, node = facts[own[lower].base], facts[own[upper].base]
    if not is_ancestor(facts, base.commit_id, node.commit_id):
        return False
    if node.height - base.height <= LATE_WINDOW:
        return True
    while node.height > base.height:
        if lower in node.listed:
            return True
        node = facts[node.parent_id]
    return False
