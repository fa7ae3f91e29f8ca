"""The owner's word and the sensors start and stop the children, and the time given is counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from tests.fakes.policy_world import Children, World, run, wait
from volunteer.agent import policy_task as policy_module
from volunteer.agent.policy_task import PolicyTask
from volunteer.config import Config
from volunteer.rounds import events as ev


def test_it_starts_both_and_says_so_once(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(60)
        assert children.is_trainer_wanted
        assert children.is_aggregator_wanted
        assert children.events == [ev.ContributingChanged(True)]
        assert policy.is_training
        assert not policy.is_paused_by_owner

    run(world, tmp_path, body)


def test_a_pause_returns_when_all_has_stopped(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(10.1)
        await policy.pause(None)
        assert trio.current_time() == pytest.approx(12.1)
        assert not children.is_trainer_wanted
        assert not children.is_aggregator_wanted
        assert children.events[-1] == ev.ContributingChanged(False)
        assert policy.is_paused_by_owner
        assert not policy.is_training
        await wait(300)
        assert not children.is_trainer_wanted, "until it is resumed"
        await policy.resume()
        assert children.is_trainer_wanted
        assert not policy.is_paused_by_owner
        assert children.events[-1] == ev.ContributingChanged(True)
        assert len(children.events) == 3

    run(world, tmp_path, body)


def test_a_timed_pause_ends_by_itself(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        await policy.pause(600)
        await wait(590)
        assert policy.is_paused_by_owner
        assert policy.decision.resumes_at_s == pytest.approx(601)
        await wait(9)
        assert children.is_trainer_wanted

    run(world, tmp_path, body)


def test_the_last_pause_counts(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await policy.pause(10)
        await policy.pause(None)
        await wait(300)
        assert policy.is_paused_by_owner
        await policy.pause(10)
        await wait(20)
        assert children.is_trainer_wanted

    run(world, tmp_path, body)


@pytest.mark.parametrize("on_battery", [True, None])
def test_on_battery_it_stops_once_that_is_steady(
    world: World, tmp_path: Path, on_battery: bool | None
) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(30)
        world.on_battery = on_battery
        await wait(9)
        world.on_battery = False
        await wait(11)
        assert children.stopped_at_s == [], "it did not last"
        world.on_battery = on_battery
        await wait(30)
        assert not children.is_trainer_wanted
        assert not policy.is_paused_by_owner
        assert "battery" in policy.decision.reason
        await policy.resume()
        assert not children.is_trainer_wanted, "resuming ends the owner's pause only"
        world.on_battery = False
        await wait(59)
        assert not children.is_trainer_wanted
        await wait(12)
        assert children.is_trainer_wanted

    run(world, tmp_path, body)


def test_ignoring_idleness_ignores_the_battery_and_not_the_disk(
    world: World, tmp_path: Path
) -> None:
    world.on_battery = True

    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(30)
        assert children.is_trainer_wanted
        world.free_bytes = 0
        await wait(30)
        assert not children.is_trainer_wanted
        assert "disk" in policy.decision.reason
        await policy.resume()
        assert not children.is_trainer_wanted

    run(world, tmp_path, body, is_idle_ignored=True)


def test_the_first_look_counts_at_once(world: World, tmp_path: Path) -> None:
    world.on_battery = True

    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(5)
        assert children.events == []
        assert not policy.decision.may_contribute

    run(world, tmp_path, body)


def test_shutting_down_while_it_starts_and_stops_ends_it_for_good(
    world: World, tmp_path: Path
) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(policy.resume)
            nursery.start_soon(policy.pause, 1.0)
            nursery.start_soon(policy.shut_down)
            nursery.start_soon(policy.resume)
        await wait(100)
        await policy.resume()
        assert not children.is_trainer_wanted
        assert not children.is_aggregator_wanted

    run(world, tmp_path, body)


def test_resuming_tries_again_what_was_given_up(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        await policy.pause(1.0)
        await wait(100)
        assert children.num_forgiven == 0, "only the owner's word forgives"
        await policy.resume()
        assert children.num_forgiven == 2, "trainer and aggregator"

    run(world, tmp_path, body)


def test_only_time_in_which_it_steps_is_counted(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(0.1)
        children.is_stepping = False
        await wait(99.9)
        policy.flush()
        assert children.contributed_s <= 0.5, "it is loading"
        children.is_stepping = True
        await wait(100)
        await policy.pause(None)
        assert children.contributed_s == pytest.approx(100, abs=1.0)
        await wait(300)
        policy.flush()
        assert children.contributed_s == pytest.approx(100, abs=1.0)

    run(world, tmp_path, body)


def test_what_was_counted_is_written_now_and_then(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(100)
        assert children.contributed_s >= 100 - policy_module.COUNT_EVERY_S - 1

    run(world, tmp_path, body)


def test_a_touch_stops_it_at_once_and_minutes_of_calm_start_it(
    world: World, tmp_path: Path
) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(10.2)
        assert children.is_trainer_wanted
        world.idle_s = 0.1
        world.notify()
        await wait(2.1)
        assert children.stopped_at_s == [pytest.approx(12.2, abs=0.05)], "not at the next look"
        assert "using the machine" in policy.decision.reason
        world.idle_s = 239.0
        await wait(100)
        assert not children.is_trainer_wanted
        world.idle_s = 240.0
        await wait(30)
        world.idle_s = 300.0
        await wait(29)
        assert not children.is_trainer_wanted
        await wait(2)
        assert children.is_trainer_wanted

    run(world, tmp_path, body)


def test_nothing_runs_before_the_sensors_have_told(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        assert policy.decision.cause == "looking"
        assert not world.has_started
        assert not children.is_trainer_wanted
        await wait(1)
        assert children.is_trainer_wanted

    run(world, tmp_path, body)
    assert world.has_stopped


def test_the_networks_hours_hold_its_bulk_while_the_owner_pauses_too(
    world: World, tmp_path: Path
) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        assert policy.gate.reason, "nobody has looked yet"
        await wait(1)
        assert policy.gate.reason == ""
        await policy.pause(None)
        assert policy.gate.reason == "", "what was trained can still be fetched by others"
        world.is_metered = True
        await wait(12)
        assert policy.decision.reason == "paused by you"
        assert policy.gate.reason == "the network connection is metered"
        world.is_metered = False
        await wait(61)
        assert policy.gate.reason == ""

    run(world, tmp_path, body)


def test_near_the_owners_limit_old_states_go_and_above_it_nothing_is_fetched(
    world: World, tmp_path: Path
) -> None:
    told: list[bool] = []

    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        policy.spare_disk = told.append
        await wait(1)
        assert not any(told)
        world.own_disk_bytes = 800_000_000
        await wait(1)
        assert told[-1]
        assert children.is_trainer_wanted
        assert not policy.gate.reason
        world.own_disk_bytes = 1_000_000_001
        await wait(14)
        assert not children.is_trainer_wanted
        assert policy.gate.reason == policy.decision.reason
        assert policy.gate.may_serve, "others may have what is here"
        world.own_disk_bytes = 500_000_000
        await wait(61)
        assert children.is_trainer_wanted
        assert not told[-1]
        assert not policy.gate.reason

    run(world, tmp_path, body, config=Config(disk_max_bytes=1_000_000_000))


def test_the_machine_may_sleep_once_nothing_runs(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(10)
        before = world.num_may_sleep
        await wait(10)
        assert world.num_may_sleep == before, "steps would be lost"
        await policy.pause(None)
        assert world.num_may_sleep > before

    run(world, tmp_path, body)


def test_chosen_gpus_are_all_that_the_trainer_sees(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = ("GPU-8a5c0d3e-0000-1111-2222-333344445555", "GPU-9a5c0d3e-0000-1111-2222-333344445555")
    for name in policy_module.GPU_VARIABLES:
        monkeypatch.setenv(name, "0")

    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        assert children.is_trainer_wanted
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(gpus)

    run(world, tmp_path, body, config=Config(gpus=gpus))


def test_clients_are_told_to_the_sensors(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        policy.note_client(4242)
        assert world.clients == [4242]
        await wait(1)

    run(world, tmp_path, body)


def test_news_after_the_end_do_no_harm(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)

    run(world, tmp_path, body)
    world.notify()


def test_settings_that_change_hold_from_the_next_look_on(world: World, tmp_path: Path) -> None:
    world.idle_s = 30

    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(100)
        assert not children.is_trainer_wanted
        world.settings = Config(headless=True)
        await wait(1)
        assert children.is_trainer_wanted

    run(world, tmp_path, body)
