"""The device is given back within the promised time, whatever the trainer does."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import trio
from trio.testing import MockClock

from tests.fakes import child_programs as programs
from tests.fakes.trainers import REBASE, WatchedTrainer
from tests.fakes.virtual_time import (
    let_processes_run,
    settle,
    until,
)
from volunteer.agent.backoff import MAX_CRASHES
from volunteer.agent.trainer_service import (
    STOP_DEADLINE_S,
)
from volunteer.messages import (
    Contribute,
    SnapshotSaved,
    Stepped,
    Stopping,
    TrainerStarted,
)


def test_a_trainer_that_obeys_saves_and_ends(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER)

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
    trainer = WatchedTrainer(tmp_path, programs.TRAINER_IGNORES_STOP)

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


def test_one_that_is_still_loading_is_ended_at_once(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.DEAF)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.service.pid is not None)
        pid = trainer.service.pid
        assert pid is not None
        assert await trainer.stop(nursery, clock) < 0.5, "it has nothing to save"
        assert not psutil.pid_exists(pid)

    trainer.run(body)


@pytest.mark.parametrize("num_turns", range(8))
def test_one_that_is_just_being_started_is_stopped_too(tmp_path: Path, num_turns: int) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER_IGNORES_STOP)

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
    trainer = WatchedTrainer(tmp_path, programs.TRAINER)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        assert await trainer.stop(nursery, clock) == 0

    trainer.run(body)


def test_commands_after_the_end_are_refused(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.CRASHES_AT_ONCE)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.num_ends == 1)
        assert not trainer.service.send(Contribute(base="c", round_index=0))

    trainer.run(body)


def test_cancelling_leaves_no_process(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER_IGNORES_STOP)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.heard(TrainerStarted))

    trainer.run(body)


def test_one_that_ended_because_this_agent_stood_still_is_back_at_once(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER_OF_A_STOPPED_AGENT)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service = trainer.service
        service.want()
        await until(lambda: trainer.num_ends > MAX_CRASHES + 1)  # no time passes
        trainer.use(programs.TRAINER)
        await until(lambda: service.send(REBASE) and service.is_stepping)
        assert service.view.problem == ""
        assert not service._backoff.is_broken
        assert service.view.inner_step == 6

    trainer.run(body)
