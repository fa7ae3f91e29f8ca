"""The simulated world does what it says: faults by name, meshes, disks, lids."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest

from volunteer.lab.simulation.byzantine import LIES
from volunteer.lab.simulation.disagreement import Disagreement
from volunteer.lab.simulation.disk import Disk
from volunteer.lab.simulation.errors import BrokenRule
from volunteer.lab.simulation.exchange import _differences
from volunteer.lab.simulation.faults import (
    FAULTS,
    UnknownFaultError,
    make_scenario,
    parse_faults,
)
from volunteer.lab.simulation.gossip import Mesh, draw_mesh
from volunteer.lab.simulation.scenario import ROUND_S, Scenario
from volunteer.lab.simulation.simulation import Simulation
from volunteer.lab.simulation.world import CLEAN, Net, World
from volunteer.rounds.records import Leaving
from volunteer.rounds.requests import Requests

pytestmark = pytest.mark.simulation


def test_every_fault_changes_the_scenario() -> None:
    perfect = make_scenario(12, 5, ())
    for fault in FAULTS:
        scenario = make_scenario(12, 5, {fault})
        assert scenario != perfect, fault
        assert (scenario.num_liars > 0) == (fault in LIES)


def test_faults_are_named() -> None:
    assert parse_faults("all") == frozenset(FAULTS)
    assert parse_faults("none") == frozenset()
    assert parse_faults(" loss, spam") == {"loss", "spam"}
    with pytest.raises(UnknownFaultError, match="did you mean sleepers"):
        parse_faults("loss,sleeper")
    with pytest.raises(UnknownFaultError, match="at least one"):
        parse_faults("")


@pytest.mark.parametrize("num_peers", [2, 3, 9, 200])
def test_a_mesh_reaches_everyone_and_nobody_has_many_neighbours(num_peers: int) -> None:
    rng = random.Random(num_peers)
    names = [f"p{i}" for i in range(num_peers)]
    neighbours = draw_mesh(names, 8, rng)
    assert all(len(others) <= 8 for others in neighbours.values())
    mesh = Mesh(World(rng, CLEAN), neighbours, lambda _: True, lambda *_: False)
    assert mesh.spread("p0").keys() == set(names) - {"p0"}
    num_links = sum(len(others) for others in neighbours.values())
    assert mesh.num_copies == num_links - (num_peers - 1), "once over every link but the first"


def test_a_mesh_stops_at_a_partition_and_at_who_is_down() -> None:
    rng = random.Random(1)
    names = [f"p{i}" for i in range(20)]
    world = World(rng, CLEAN)
    mesh = Mesh(world, draw_mesh(names, 6, rng), lambda peer: peer != "p1", lambda *_: False)
    world.partition = {name: i % 2 for i, name in enumerate(names)}
    assert set(mesh.spread("p0")) <= set(names[::2])
    assert mesh.spread("p1") == {}


def test_a_disk_keeps_records_by_height_and_forgets_them() -> None:
    disk = Disk()
    for height in (3, 5, 5):
        number = len(disk.records)
        record = Leaving(
            run_id="ab" * 32,
            module_id="dense",
            round_index=height,
            author=f"a{number}",
            base="cd" * 32,
        )
        disk.keep(f"id {number}", record)
    assert disk.num_from(4) == 2
    disk.forget(["id 1", "never was"])
    assert list(disk.records) == ["id 0", "id 2"]
    assert list(disk.by_height[5]) == ["id 2"]


def test_what_there_was_no_room_for_is_named_and_not_sent_again_until_a_restart() -> None:
    simulation = Simulation(make_scenario(2, 1, ()), 1)
    one, other = simulation.members.values()
    record = Leaving(run_id="ab" * 32, module_id="dense", round_index=5, author="a", base="cd" * 32)
    for member in (one, other):
        member.disk.keep("id", record)
    assert _differences(one, other, 0) == ([], [])
    other.disk.forget(["id"])
    assert other.disk.num_from(5) == 1, "it is named in an exchange"
    assert _differences(one, other, 0) == _differences(other, one, 0) == ([], [])
    other.crash()
    assert _differences(one, other, 0) == ([("id", record)], [])
    other.disk.keep("id", record)
    assert _differences(one, other, 0) == ([], [])


@pytest.mark.slow
def test_looking_at_everything_at_every_event_makes_the_same_history(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = make_scenario(8, 8, FAULTS)
    only_when_due = [Simulation(scenario, seed).run() for seed in range(2)]
    monkeypatch.setattr(Requests, "is_any_due", lambda _self, _now_s: True)
    assert [Simulation(scenario, seed).run() for seed in range(2)] == only_when_due


def test_nothing_happens_to_a_closed_lid_and_all_of_it_once_it_opens() -> None:
    simulation = Simulation(make_scenario(3, 9, ()), 1)
    member = simulation.members["peer-01"]
    simulation.world.after(1.5 * ROUND_S, member.freeze)
    seen: dict[str, tuple[str | None, int]] = {}

    def look(name: str) -> None:
        trainer = member.trainer
        assert trainer is not None
        seen[name] = (member.machine.tip, sum(unit.tokens for unit in trainer.open_units))

    simulation.world.after(1.6 * ROUND_S, lambda: look("closed"))
    simulation.world.after(5.4 * ROUND_S, lambda: look("still closed"))
    simulation.world.after(5.5 * ROUND_S, member.thaw)
    simulation.world.after(7.5 * ROUND_S, lambda: look("open"))
    report = simulation.run()
    assert seen["closed"] == seen["still closed"]
    assert seen["open"][0] != seen["closed"][0]
    assert len(report.heads) == 1


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_a_third_that_lies_in_one_way_stops_nobody(lie: str) -> None:
    report = Simulation(make_scenario(6, 8, {lie}), 3).run()
    assert len(report.heads) == 1
    assert report.progress >= 0.75
    assert (report.num_bans > 0) == (lie in ("double-commit", "double-vote"))
    assert (report.num_refused > 0) == (lie == "old-version")


def test_a_referee_that_sees_a_second_signature_stops_the_run() -> None:
    simulation = Simulation(make_scenario(3, 6, ()), 1)
    member = simulation.members["peer-02"]

    def forget() -> None:
        member.lose_disk()
        member.num_disks = 1  # as a driver would that does not know that it has signed before
        simulation.world.partition = {"peer-02": 1}  # and nobody tells it
        member.start()

    simulation.world.after(2.5 * ROUND_S, forget)
    with pytest.raises(BrokenRule, match="I1: signed twice"):
        simulation.run()


def test_what_is_delivered_to_many_arrives_as_if_each_had_been_sent_alone() -> None:
    arrived: list[tuple[float, str]] = []
    world = World(random.Random(1), CLEAN)

    def arrive(what: str) -> None:
        arrived.append((world.now_s, what))

    world.after(2.0, partial(arrive, "before"))
    world.after_each([3.0, 1.0, 2.0], lambda i: arrive(f"to {i}"))
    world.after(2.0, partial(arrive, "after"))
    world.after_each([], lambda i: arrive("nothing"))
    world.run_until(10.0)
    assert arrived == [(1.0, "to 1"), (2.0, "before"), (2.0, "to 2"), (2.0, "after"), (3.0, "to 0")]


def test_a_net_is_whole_while_everyone_can_hear_everyone_through_others() -> None:
    world = World(random.Random(1), CLEAN)
    peers = ["a", "b", "c"]
    assert world.is_whole(peers)
    world.blocked = {frozenset(("a", "b"))}
    assert world.is_whole(peers), "c passes it on"
    assert not world.is_whole(["a", "b"]), "c is not up"
    world.blocked.add(frozenset(("a", "c")))
    assert not world.is_whole(peers)
    world.blocked.clear()
    world.partition = {"c": 1}
    assert not world.is_whole(peers)


def test_a_disagreement_is_told_from_one_in_a_net_in_parts() -> None:
    seen = Disagreement()
    for now_s, is_one, is_whole in (
        (0.0, False, True),
        (5.0, False, False),
        (10.0, False, True),
        (15.0, False, True),
        (20.0, True, True),
        (25.0, False, True),
    ):
        seen.look(now_s, is_one, partial(bool, is_whole))
    assert (seen.longest_s, seen.longest_whole_s) == (15.0, 10.0)


@pytest.mark.parametrize(("sigma", "is_ordered"), [(0.001, True), (1.0, False)])
def test_messages_overtake_each_other_only_if_delays_differ(sigma: float, is_ordered: bool) -> None:
    world = World(random.Random(3), Net(sigma=sigma))
    arrived: list[int] = []

    def send(number: int) -> None:
        world.after(world.delay_s(), partial(arrived.append, number))

    for number in range(50):
        world.after(0.05 * number, partial(send, number))
    world.run_until(1000.0)
    assert sorted(arrived) == list(range(50))
    assert (arrived == sorted(arrived)) is is_ordered


def test_what_was_wanted_before_a_crash_keeps_nobody_from_asking_after_it() -> None:
    """Found with 1,000 members: who had restarted stood three heights below the others for good."""
    net = replace(CLEAN, sync_s=1e9)
    simulation = Simulation(Scenario(num_members=3, net=net, is_open=False), 0)
    member, other = simulation.members["peer-02"], simulation.members["peer-01"]
    wanted: list[str] = []

    def restart() -> None:
        member.exchange.want("what nobody has")
        member.crash()
        member.start()
        wanted.append(next(i for i, r in other.disk.records.items() if i in member.disk.records))
        member.disk.forget(wanted)
        member.exchange.want(wanted[0])
        simulation.world.after(20.0, look)

    def look() -> None:
        assert wanted[0] in member.disk.records
        simulation.world.is_over = True

    simulation.world.after(2.5 * ROUND_S, restart)
    simulation.run()
    assert simulation.world.is_over
