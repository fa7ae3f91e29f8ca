"""The owner's word and the sensors start and stop the children, and the time given is counted."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
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
from volunteer.agent.trainer_service import TrainerService, TrainerView
from volunteer.config import Config
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.policy.report import SourceReport
from volunteer.policy.signals import InputReading, Signals
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
    height: int = 7

    def post(self, event: ev.Event) -> None:
        self.events.append(event)

    def note_contributed(self, seconds: float) -> None:
        self.contributed_s += seconds

    @property
    def machine(self) -> _Machine:
        """The driver's: all that is asked of it is the height."""
        return _Machine(self.height)

    def trainer(self) -> TrainerService:
        return cast("TrainerService", _Trainer(self))

    def aggregator(self) -> AggregatorService:
        return cast("AggregatorService", _Aggregator(self))


class _Machine:
    """Twin of the round protocol's machine, with one commit."""

    tip = "tip"

    def __init__(self, height: int) -> None:
        fact = SimpleNamespace(height=height)
        self.timing = SimpleNamespace(round_s=600.0)
        self.known = SimpleNamespace(facts={"tip": fact})


@dataclass
class _Trainer:
    children: Children
    pid: int | None = None
    view: TrainerView = field(default_factory=TrainerView)

    @property
    def is_stepping(self) -> bool:
        return self.children.is_stepping

    def want(self) -> None:
        self.children.is_trainer_wanted = True
        self.children.is_stepping = True

    def forgive(self) -> None:
        self.children.num_forgiven += 1

    async def stop(self) -> None:
        await trio.sleep(self.children.stop_s)  # noqa: TID251 - virtual time
        self.children.is_trainer_wanted = self.children.is_stepping = False
        self.children.stopped_at_s.append(trio.current_time())


@dataclass
class _Aggregator:
    children: Children
    pid: int | None = None

    def want(self) -> None:
        self.children.is_aggregator_wanted = True

    def forgive(self) -> None:
        self.children.num_forgiven += 1

    def stop(self) -> None:
        self.children.is_aggregator_wanted = False

    async def wait_gone(self) -> None:
        await trio.lowlevel.checkpoint()


@dataclass
class World:
    """The sensors' twin: what they read is what the test says."""

    on_battery: bool | None = False
    is_metered: bool = False
    free_bytes: int | None = 10**12
    own_disk_bytes: int | None = None
    idle_s: float = 10**6
    settings: Config = field(default_factory=Config)
    notify: Callable[[], None] = lambda: None
    has_started: bool = False
    has_stopped: bool = False
    clients: list[int] = field(default_factory=list)
    num_may_sleep: int = 0

    def start(self) -> None:
        self.has_started = True

    def stop(self) -> None:
        self.has_stopped = True

    def wait_told(self, deadline_s: float) -> None:
        assert self.has_started

    def read(self, now_s: float) -> Signals:
        return Signals(
            disk_free_bytes=self.free_bytes,
            own_disk_bytes=self.own_disk_bytes,
            on_battery=self.on_battery,
            is_metered=self.is_metered,
            input=InputReading(has_desktop=True, idle_s=self.idle_s, terminal_idle_s=10**6),
        )

    def note_client(self, pid: int) -> None:
        self.clients.append(pid)

    def allow_sleep(self) -> None:
        self.num_may_sleep += 1

    def reports(self) -> list[SourceReport]:
        return [SourceReport(name="disk", is_well=True, value="-", meaning="told")]

    def config(self) -> Config:
        return self.settings

    def make(self, config: Config, locations: Locations, notify: Callable[[], None]) -> World:
        self.settings, self.notify = config, notify
        return self


Body = Callable[[PolicyTask, Children, World], Awaitable[None]]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(policy_module, "now_s", trio.current_time)
    monkeypatch.setattr(trio.to_thread, "run_sync", run_threads_inline)
    return World()


def run(
    world: World,
    tmp_path: Path,
    body: Body,
    *,
    is_idle_ignored: bool = False,
    stop_s: float = 2.0,
    config: Config | None = None,
) -> Children:
    children = Children(stop_s=stop_s)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        policy = PolicyTask(
            config=config or Config(),
            locations=Locations.from_environment({HOME_VARIABLE: str(tmp_path)}),
            driver=cast("RoundDriver", children),
            trainer=children.trainer(),
            aggregator=children.aggregator(),
            keeper=cast("Bookkeeper", children),
            is_idle_ignored=is_idle_ignored,
            make_sensors=world.make,
        )
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
