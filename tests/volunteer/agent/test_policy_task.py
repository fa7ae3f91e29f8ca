"""The owner's word and the sensors start and stop the children, and the time given is counted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from tests.fakes.virtual_time import in_nursery, run_threads_inline, run_virtual
from volunteer.agent import policy_task as policy_module
from volunteer.agent.aggregator_service import AggregatorService
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.driver import RoundDriver
from volunteer.agent.policy_task import PolicyTask
from volunteer.agent.trainer_service import TrainerService
from volunteer.config import Config
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.policy.signals import Signals
from volunteer.rounds import events as ev


@dataclass
class Children:
    """Twins of trainer, aggregator, driver and keeper, in one."""

    is_trainer_wanted: bool = False
    is_aggregator_wanted: bool = False
    is_stepping: bool = False
    stop_s: float = 2.0
    stopped_at_s: list[float] = field(default_factory=list)
    events: list[ev.Event] = field(default_factory=list)
    contributed_s: float = 0.0
    num_forgiven: int = 0

    def post(self, event: ev.Event) -> None:
        self.events.append(event)

    def note_contributed(self, seconds: float) -> None:
        self.contributed_s += seconds

    def trainer(self) -> TrainerService:
        return cast("TrainerService", _Trainer(self))

    def aggregator(self) -> AggregatorService:
        return cast("AggregatorService", _Aggregator(self))


@dataclass
class _Trainer:
    children: Children

    @property
    def is_stepping(self) -> bool:
        return self.children.is_stepping

    def want(self) -> None:
        self.children.num_forgiven += self.children.is_trainer_wanted
        self.children.is_trainer_wanted = True
        self.children.is_stepping = True

    async def stop(self) -> None:
        await trio.sleep(self.children.stop_s)  # noqa: TID251 - virtual time
        self.children.is_trainer_wanted = self.children.is_stepping = False
        self.children.stopped_at_s.append(trio.current_time())


@dataclass
class _Aggregator:
    children: Children

    def want(self) -> None:
        self.children.is_aggregator_wanted = True

    def stop(self) -> None:
        self.children.is_aggregator_wanted = False

    async def wait_gone(self) -> None:
        await trio.lowlevel.checkpoint()


@dataclass
class World:
    """What the sensors see."""

    on_battery: bool | None = False
    free_bytes: int | None = 10**12


Body = Callable[[PolicyTask, Children, World], Awaitable[None]]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    monkeypatch.setattr(policy_module, "now_s", trio.current_time)
    monkeypatch.setattr(trio.to_thread, "run_sync", run_threads_inline)
    monkeypatch.setattr(policy_module, "read_on_battery", lambda: world.on_battery)
    monkeypatch.setattr(policy_module, "read_free_bytes", lambda folder: world.free_bytes)
    return world


async def at_once(read: Callable[[], Signals]) -> Signals:
    await trio.lowlevel.checkpoint()
    return read()


def run(
    world: World, tmp_path: Path, body: Body, *, is_idle_ignored: bool = False, stop_s: float = 2.0
) -> Children:
    children = Children(stop_s=stop_s)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        policy = PolicyTask(
            config=Config(),
            locations=Locations.from_environment({HOME_VARIABLE: str(tmp_path)}),
            driver=cast("RoundDriver", children),
            trainer=children.trainer(),
            aggregator=children.aggregator(),
            keeper=cast("Bookkeeper", children),
            is_idle_ignored=is_idle_ignored,
            in_thread=at_once,
        )
        policy._sensed_at_s = policy._counted_at_s = trio.current_time()  # not the real clock's
        nursery.start_soon(policy.run)
        await body(policy, children, world)

    run_virtual(in_nursery(main), jumps=True)
    return children


async def wait(seconds: float) -> None:
    await trio.sleep(seconds)  # noqa: TID251 - virtual time


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
        await wait(10**4)
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
        await policy.pause(3600)
        await wait(3590)
        assert policy.is_paused_by_owner
        assert policy.decision.resumes_at_s == pytest.approx(3601)
        await wait(9)
        assert children.is_trainer_wanted

    run(world, tmp_path, body)


def test_the_last_pause_counts(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await policy.pause(10)
        await policy.pause(None)
        await wait(1000)
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
        children.is_aggregator_wanted = False  # as a service does that has given up
        await policy.resume()
        assert children.is_aggregator_wanted
        assert children.num_forgiven == 1

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
        await wait(1000)
        policy.flush()
        assert children.contributed_s == pytest.approx(100, abs=1.0)

    run(world, tmp_path, body)


def test_what_was_counted_is_written_now_and_then(world: World, tmp_path: Path) -> None:
    async def body(policy: PolicyTask, children: Children, world: World) -> None:
        await wait(100)
        assert children.contributed_s >= 100 - policy_module.COUNT_EVERY_S - 1

    run(world, tmp_path, body)
