"""The device is given back within the promised time, whatever the trainer does."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest
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
from volunteer.agent.backoff import MAX_CRASHES
from volunteer.agent.trainer_service import (
    SILENCE_DEADLINE_S,
    STOP_DEADLINE_S,
    TrainerService,
)
from volunteer.messages import (
    Contribute,
    Rebase,
    SnapshotSaved,
    Stepped,
    Stopping,
    TrainerEvent,
    TrainerFailed,
    TrainerStarted,
)

REBASE = Rebase(
    commit_id="c", round_index=0, state_hash="s", pending=(), works=(), known_contributions=()
)


class Fixture:
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

    def _has_ended(self, times: int) -> bool:
        return self.num_ends == times

    async def crash(self, clock: MockClock, times: int) -> None:
        for number in range(1, times + 1):
            await until(functools.partial(self._has_ended, number))
            await settle()
            clock.jump(16.0)


def test_a_trainer_that_obeys_saves_and_ends(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.TRAINER)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        assert not trainer.service.send(REBASE), "there is none yet"
        trainer.service.want()
        await until(lambda: trainer.heard(TrainerStarted))
        view = trainer.service.view
        assert (view.device, view.inner_step, view.tokens_total) == ("cpu", 5, 500)
        assert not trainer.service.is_stepping
        assert trainer.service.send(REBASE)
        await until(lambda: trainer.heard(Stepped))
        assert trainer.service.is_stepping
        assert (view.tokens_per_s, view.loss) == (50.0, 2.5)
        assert await trainer.stop(nursery, clock) < STOP_DEADLINE_S
        assert trainer.heard(Stopping)
        assert trainer.heard(SnapshotSaved)
        assert trainer.service.pid is None
        assert view.tokens_per_s == 0.0
        clock.jump(1000)
        await settle()
        assert trainer.service.pid is None
        assert trainer.num_ends == 1

    trainer.run(body)


@pytest.mark.slow
def test_one_that_does_not_obey_is_killed_in_time(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.TRAINER_IGNORES_STOP)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.heard(TrainerStarted))
        pid = trainer.service.pid
        assert pid is not None
        assert STOP_DEADLINE_S <= await trainer.stop(nursery, clock) <= STOP_DEADLINE_S + 0.5
        assert STOP_DEADLINE_S < 5.0, "the owner was promised five seconds"
        assert not psutil.pid_exists(pid)
        assert not trainer.service.view.problem

    trainer.run(body)


@pytest.mark.parametrize("num_turns", range(8))
def test_one_that_is_just_being_started_is_stopped_too(tmp_path: Path, num_turns: int) -> None:
    trainer = Fixture(tmp_path, programs.TRAINER_IGNORES_STOP)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await settle(num_turns)
        await trainer.stop(nursery, clock)
        assert trainer.service.pid is None
        assert not psutil.Process().children()
        await let_processes_run(20)
        assert trainer.service.pid is None
        assert not psutil.Process().children()
        assert trainer.service._backoff.crashes == 0

    trainer.run(body)


def test_stopping_what_does_not_run_is_nothing(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.TRAINER)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        assert await trainer.stop(nursery, clock) == 0

    trainer.run(body)


def test_five_crashes_give_up_with_the_reason_and_wanting_forgives(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.CRASHES_AT_ONCE)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await trainer.crash(clock, MAX_CRASHES)
        assert trainer.service.view.problem == (
            "the trainer ended 5 times in a row (exit status 3)"
        )
        clock.jump(1000)
        await settle()
        assert trainer.num_ends == MAX_CRASHES
        trainer.use(programs.TRAINER)
        trainer.service.want()
        assert trainer.service.view.problem == ""
        await until(lambda: trainer.heard(TrainerStarted))

    trainer.run(body)


def test_steps_forgive_crashes(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.TRAINER_STEPS_AND_CRASHES)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await trainer.crash(clock, MAX_CRASHES + 2)
        assert not trainer.service.view.problem
        assert trainer.service._wanted.is_set()

    trainer.run(body)


def test_what_it_says_about_its_end_is_the_problem(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.TRAINER_FAILS)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.num_ends == 1)
        assert trainer.heard(TrainerFailed)
        assert trainer.service.view.problem == "the device is full; close a game"
        trainer.use(programs.TRAINER)
        await settle()
        clock.jump(1.0)
        await until(lambda: trainer.service.pid)
        await until(lambda: len([e for e in trainer.events if isinstance(e, TrainerStarted)]) == 2)
        trainer.service.send(REBASE)
        await until(lambda: trainer.heard(Stepped))
        assert trainer.service.view.problem == ""

    trainer.run(body)


def test_one_that_never_starts_is_killed_as_silent(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.DEAF)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.service.pid)
        await settle()
        clock.jump(SILENCE_DEADLINE_S - 1)
        await let_processes_run(20)
        assert trainer.num_ends == 0
        clock.jump(1)
        await until(lambda: trainer.num_ends == 1)
        assert trainer.service._backoff.crashes == 1

    trainer.run(body)


def test_silence_counts_from_where_it_was_told_to_stand(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.TRAINER_NEVER_STEPS)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.heard(TrainerStarted))
        clock.jump(10 * SILENCE_DEADLINE_S)  # a large state is being fetched
        await let_processes_run(20)
        assert trainer.num_ends == 0
        for _ in range(3):
            trainer.service.send(REBASE)
            clock.jump(SILENCE_DEADLINE_S / 3)
            await settle()
        await until(lambda: trainer.num_ends == 1)

    trainer.run(body)


def test_garbage_and_a_flood_count_as_crashes(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.FLOOD)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.num_ends == 1)
        assert trainer.service._backoff.crashes == 1

    trainer.run(body)


def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.TRAINER)
    trainer.service._argv = [str(tmp_path / "nothing")]

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.num_ends == 1)
        assert "cannot be started" in trainer.service.view.problem
        assert await trainer.stop(nursery, clock) == 0

    trainer.run(body)


def test_commands_after_the_end_are_refused(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.CRASHES_AT_ONCE)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.num_ends == 1)
        assert not trainer.service.send(Contribute(base="c", round_index=0))

    trainer.run(body)


def test_cancelling_leaves_no_process(tmp_path: Path) -> None:
    trainer = Fixture(tmp_path, programs.TRAINER_IGNORES_STOP)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.heard(TrainerStarted))

    trainer.run(body)
