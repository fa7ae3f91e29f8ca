"""The owner lets the round be finished, then the machine rests, or the agent ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.fakes.policy_world import Children, World, run, wait
from volunteer.agent.policy_task import PolicyTask


def test_finish_stops_when_the_round_has_closed_and_outlives_a_restart(
    world: World, tmp_path: Path
) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        await policy.finish()
        await wait(300)
        assert children.is_trainer_wanted, "the round is still open"
        children.height += 1
        await wait(4)
        assert not children.is_trainer_wanted
        assert policy.is_paused_by_owner
        assert policy.decision.reason == "finished as you said: round 7 has closed"

    async def after(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(100)
        assert policy.is_paused_by_owner
        await policy.resume()
        assert children.is_trainer_wanted

    run(world, tmp_path, body)
    run(world, tmp_path, after)


def test_a_finish_is_taken_back_by_resume(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        await policy.finish()
        await policy.resume()
        children.height += 1
        await wait(10)
        assert children.is_trainer_wanted

    run(world, tmp_path, body)


def test_a_finish_outlives_a_restart_before_the_round_has_closed(
    world: World, tmp_path: Path
) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        await policy.finish()
        assert policy.word.finishes_round == 7

    async def after(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        assert children.is_trainer_wanted
        assert policy.word.finishes_round == 7
        children.height = 8
        await wait(4)
        assert policy.is_paused_by_owner
        assert not children.is_trainer_wanted

    run(world, tmp_path, body)
    run(world, tmp_path, after)


def test_a_round_that_never_closes_is_left_in_the_end(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        await policy.finish()
        await wait(1790)
        assert children.is_trainer_wanted
        await wait(20)
        assert not children.is_trainer_wanted
        assert policy.decision.reason == "paused as you said: round 7 did not close in time"

    run(world, tmp_path, body)


def test_a_finish_that_the_owner_interrupts_is_a_pause(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        await policy.finish()
        world.idle_s = 0.1
        world.notify()
        await wait(3)
        assert policy.decision.reason == "paused by you"
        assert policy.word.finishes_round is None
        world.idle_s = 10**6
        await wait(1000)
        assert not children.is_trainer_wanted, "not again at night"

    run(world, tmp_path, body)


def test_where_nothing_is_trained_there_is_nothing_to_finish(world: World, tmp_path: Path) -> None:
    world.on_battery = True
    ended: list[str] = []

    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        policy.on_finished = lambda: ended.append("ended")
        await wait(1)
        await policy.finish()
        assert policy.is_paused_by_owner
        world.on_battery = False
        await wait(100)
        assert not children.is_trainer_wanted
        await policy.finish(ends_agent=True)
        assert ended == ["ended"]

    run(world, tmp_path, body)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_stopping_after_the_round_ends_the_agent_and_the_next_one_contributes(
    world: World, tmp_path: Path, is_interrupted: bool
) -> None:
    ended: list[float] = []

    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        policy.on_finished = lambda: ended.append(trio.current_time())
        await wait(1)
        await policy.finish(ends_agent=True)
        await wait(100)
        assert ended == []
        assert policy.word.ends_agent
        if is_interrupted:
            world.idle_s = 0.1
        else:
            children.height += 1
        await wait(4)
        assert len(ended) == 1
        assert not children.is_trainer_wanted
        world.idle_s = 10**6
        await wait(1000)
        assert not children.is_trainer_wanted, "it has ended"
        assert len(ended) == 1

    async def after(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        assert children.is_trainer_wanted

    run(world, tmp_path, body)
    run(world, tmp_path, after)


@pytest.mark.parametrize("is_restart", [False, True])
def test_who_is_stopped_before_the_round_has_closed_does_not_rest_after_the_next_start(
    world: World, tmp_path: Path, is_restart: bool
) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        await policy.finish(ends_agent=True)
        await policy.shut_down(is_restart=is_restart)

    async def after(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        assert policy.word.finishes_round == (7 if is_restart else None)

    run(world, tmp_path, body)
    run(world, tmp_path, after)


@pytest.mark.parametrize("is_owners_start", [False, True])
def test_a_stop_that_a_crash_interrupts_still_comes_unless_the_owner_starts_it_again(
    world: World, tmp_path: Path, is_owners_start: bool
) -> None:
    ended: list[str] = []

    async def killed(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        await policy.finish(ends_agent=True)

    async def after(policy: PolicyTask, children: Children, world: World) -> None:
        policy.on_finished = lambda: ended.append("ended")
        await wait(1)
        assert children.is_trainer_wanted
        assert policy.word.ends_agent is not is_owners_start
        children.height += 1
        await wait(10)
        assert ended == ([] if is_owners_start else ["ended"])
        assert children.is_trainer_wanted is is_owners_start

    async def later(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(1)
        assert policy.word.pause is None, "`stop` is no pause"

    run(world, tmp_path, killed)
    run(world, tmp_path, after, is_owners_start=is_owners_start)
    run(world, tmp_path, later)


def test_resuming_takes_back_that_the_agent_ends(world: World, tmp_path: Path) -> None:
    ended: list[str] = []

    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        policy.on_finished = lambda: ended.append("ended")
        await wait(1)
        await policy.finish(ends_agent=True)
        await policy.resume()
        await policy.finish()
        children.height += 1
        await wait(10)
        assert policy.is_paused_by_owner
        assert ended == []

    run(world, tmp_path, body)
