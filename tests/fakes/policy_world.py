"""The policy task's world: twins of its sensors and of what it starts and stops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import trio
from trio.testing import MockClock

from tests.fakes.virtual_time import in_nursery, run_virtual
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


def run(
    world: World,
    tmp_path: Path,
    body: Body,
    *,
    is_idle_ignored: bool = False,
    stop_s: float = 2.0,
    config: Config | None = None,
    is_owners_start: bool = False,
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
            is_owners_start=is_owners_start,
            make_sensors=world.make,
        )
        nursery.start_soon(policy.run)
        await body(policy, children, world)

    run_virtual(in_nursery(main), jumps=True)
    return children


async def wait(seconds: float) -> None:
    await trio.sleep(seconds)  # noqa: TID251 - virtual time
