"""A trainer service with a twin of the trainer, in virtual time, and what it said."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import trio
from trio.testing import MockClock

from tests.fakes import child_programs as programs
from tests.fakes.virtual_time import (
    in_nursery,
    let_processes_run,
    run_virtual,
    settle,
    until,
)
from volunteer.agent.step_watch import WATCH_EVERY_S
from volunteer.agent.trainer_service import (
    TrainerService,
)
from volunteer.messages import (
    Rebase,
    TrainerEvent,
)

REBASE = Rebase(
    commit_id="c", round_index=0, state_hash="s", pending=(), works=(), known_contributions=()
)


class WatchedTrainer:
    """A service and what it said."""

    def __init__(self, tmp_path: Path, script: str) -> None:
        self.events: list[TrainerEvent] = []
        self.num_ends = 0
        self.service = TrainerService([], tmp_path / "trainer.log", self._hear, self._end)
        self.use(script)

    def use(self, script: str) -> None:
        self.service._argv = programs.python(script)

    async def _hear(self, event: TrainerEvent) -> None:
        self.events.append(event)

    def _end(self) -> None:
        self.num_ends += 1

    def heard(self, kind: type[TrainerEvent]) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def run(self, body: Callable[[trio.Nursery, MockClock], Awaitable[None]]) -> None:
        async def with_service(nursery: trio.Nursery, clock: MockClock) -> None:
            nursery.start_soon(self.service.run)
            await settle(3)
            await body(nursery, clock)

        run_virtual(in_nursery(with_service))
        assert not psutil.Process().children(), "neither zombie nor orphan"

    async def stop(self, nursery: trio.Nursery, clock: MockClock) -> float:
        """Stop it, letting time pass only while it has not ended; return the seconds it took."""
        ended, begun_at_s = trio.Event(), trio.current_time()

        async def stop() -> None:
            await self.service.stop()
            ended.set()

        nursery.start_soon(stop)
        while not ended.is_set():
            await let_processes_run(40)
            if not ended.is_set():
                clock.jump(0.5)
        return trio.current_time() - begun_at_s

    async def watch(self, clock: MockClock, seconds: float) -> None:
        """Let time pass as it does, in the watch's periods."""
        for _ in range(int(seconds / WATCH_EVERY_S)):
            clock.jump(WATCH_EVERY_S)
            await settle(10)

    def _has_ended(self, times: int) -> bool:
        return self.num_ends == times

    async def crash(self, clock: MockClock, times: int) -> None:
        for number in range(1, times + 1):
            await until(functools.partial(self._has_ended, number))
            await settle()
            clock.jump(16.0)
