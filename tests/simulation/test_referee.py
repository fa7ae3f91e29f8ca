"""The referee accuses nobody wrongly, and believes nobody blindly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from volunteer.lab.simulation.errors import BrokenRule
from volunteer.lab.simulation.judged import AGAIN_EVERY, Judged
from volunteer.lab.simulation.member import Member
from volunteer.lab.simulation.scenario import ROUND_S, Scenario
from volunteer.lab.simulation.simulation import Simulation
from volunteer.lab.simulation.world import CLEAN
from volunteer.rounds.chain import ChainRules, genesis_facts
from volunteer.rounds.credit import WorkState

pytestmark = pytest.mark.simulation
RULES = ChainRules(
    run_id="5a" * 32,
    module_id="dense",
    genesis_id="ab" * 32,
    publisher="p",
    expiry_rounds=8,
    demote_rounds=8,
    max_contributions=32,
    quorum_numerator=1,
    quorum_denominator=2,
)


def lose_files(member: Member, num_heights: int = 1) -> None:
    """Restart a member without its last states, and without the blobs that led there."""
    known = member.machine.known
    lost = member.machine.work.chain[-num_heights:]
    listed = [known.contributions[i] for c in lost for i in known.commits[c].contributions]
    member.crash()
    member.disk.blobs -= {c.blob_id for c in listed if c.author != member.me}
    for commit_id in lost:
        member.disk.verified.remove(commit_id)
        del member.disk.states[commit_id]
    member.start()


def test_who_stands_lower_after_losing_files_has_its_work_in_flight() -> None:
    simulation = Simulation(Scenario(num_members=3, net=CLEAN, is_open=False), 0)
    seen: list[tuple[int, WorkState]] = []

    def look() -> None:
        member = simulation.members["peer-02"]
        own = [i for i, c in member.machine.own.items() if c.base == member.machine.tip]
        if not own:
            simulation.world.after(0.25, look)
            return
        height = len(member.machine.work.chain)
        lose_files(member)  # the referee checks the books of whoever starts
        lower = height - len(member.machine.work.chain)
        seen.append((lower, member.machine.work_states()[own[0]]))

    simulation.world.after(4 * ROUND_S, look)
    report = simulation.run()
    assert seen == [(1, WorkState.IN_FLIGHT)]
    assert len(report.heads) == 1


def test_what_is_carried_further_up_is_in_flight_once() -> None:
    simulation = Simulation(Scenario(num_members=3, net=CLEAN, is_open=False), 1)
    member = simulation.members["peer-02"]
    kept_back: list[str] = []
    seen: list[tuple[int, set[WorkState], tuple[str, ...]]] = []

    def keep_back() -> None:
        own = [i for i, c in member.machine.own.items() if c.base == member.machine.tip]
        if own:
            kept_back.extend(own)
            simulation.contents.withheld.add(member.machine.own[own[0]].blob_id)
            carry()
        else:
            simulation.world.after(0.25, keep_back)

    def carry() -> None:
        carriers = [i for i, c in member.machine.own.items() if kept_back[0] in c.carries]
        if not carriers:
            simulation.world.after(0.25, carry)
            return
        height = len(member.machine.work.chain)
        lose_files(member, 3)  # the referee checks the books of whoever starts
        states = member.machine.work_states()
        lower = height - len(member.machine.work.chain)
        pending = tuple(member.machine.work.pending())
        seen.append((lower, {states[kept_back[0]], states[carriers[0]]}, pending))
        simulation.contents.withheld.clear()

    # It never has the first rank meanwhile: no branch of its own lists what others cannot fetch.
    simulation.world.after(6 * ROUND_S, keep_back)
    report = simulation.run()
    assert seen == [(3, {WorkState.IN_FLIGHT}, ())]
    assert len(report.heads) == 1


def test_facts_are_found_anew_now_and_then_and_must_be_the_same() -> None:
    judged, facts = Judged(), genesis_facts(RULES)
    assert judged.get("c") is None
    judged["c"] = facts
    assert judged.get("c") is None, "a second member finds them for itself"
    judged["c"] = genesis_facts(RULES)
    answers = [judged.get("c") for _ in range(2 * AGAIN_EVERY)]
    assert answers.count(None) == 2
    assert all(answer is facts for answer in answers if answer is not None)
    with pytest.raises(BrokenRule, match="I7"):
        judged["c"] = replace(facts, resets=1)
