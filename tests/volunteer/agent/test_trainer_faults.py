"""What goes wrong with a trainer is told, with what ends it, and mended where that is possible."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import trio
from trio.testing import MockClock

from tests.fakes import child_programs as programs
from tests.fakes.freezer import Freezer, freezing
from tests.fakes.trainers import REBASE, WatchedTrainer
from tests.fakes.virtual_time import (
    let_processes_run,
    settle,
    until,
)
from volunteer.agent import trainer_service
from volunteer.agent.backoff import MAX_CRASHES, QUARANTINE_S
from volunteer.agent.child import END_DEADLINE_S, LOOK_EVERY_S, LOOKS_UNTIL_WOKEN, Child
from volunteer.agent.step_watch import SILENCE_DEADLINE_S, WATCH_EVERY_S
from volunteer.agent.trainer_service import (
    DATA_WAIT_S,
    DISK_WAIT_S,
    LET_GO,
    MEMORY_WAIT_S,
    REACHABLE,
    STARTED_AGAIN,
    STOP_DEADLINE_S,
    TRIED_AGAIN,
    WRITABLE,
    TrainerService,
)
from volunteer.messages import (
    SnapshotSaved,
    Stepped,
    TrainerEvent,
    TrainerFailed,
    TrainerStarted,
)


def test_five_crashes_are_a_quarantine_that_only_the_owner_or_an_hour_ends(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.CRASHES_AT_ONCE)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service = trainer.service
        service.want()
        await until(lambda: service.tried_in_s is not None)
        assert service.view.problem == "the trainer has ended: exit status 3"
        assert service.view.resumes_when == STARTED_AGAIN
        await trainer.crash(clock, MAX_CRASHES)
        assert service.view.problem == (
            "the trainer ended 5 times in a row and is in quarantine: exit status 3"
        )
        assert service.view.resumes_when == TRIED_AGAIN
        clock.jump(1000)
        await service.stop()
        service.want()  # the machine was used, and is idle again
        await settle()
        assert trainer.num_ends == MAX_CRASHES
        assert service.view.problem
        clock.jump(QUARANTINE_S - 1000)
        await until(lambda: trainer.num_ends == MAX_CRASHES + 1)
        await until(lambda: service.tried_in_s == QUARANTINE_S)
        trainer.use(programs.TRAINER)
        service.forgive()
        await until(lambda: trainer.heard(TrainerStarted))
        assert service.view.problem == ""
        assert service.tried_in_s is None

    trainer.run(body)


def test_steps_forgive_crashes_if_they_are_rare(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER_STEPS_AND_CRASHES)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        for number in range(1, MAX_CRASHES + 2):
            await until(functools.partial(trainer._has_ended, number))
            await until(lambda: trainer.service.tried_in_s == 1.0)
            clock.jump(200.0)
        assert not trainer.service._backoff.is_broken
        while not trainer.service._backoff.is_broken:  # and then it crashes more often
            await until(lambda: trainer.service.tried_in_s)
            if trainer.service.tried_in_s == 1.0:
                clock.jump(16.0)
                await settle()
        assert trainer.num_ends < 2 * MAX_CRASHES
        await until(lambda: trainer.service.view.resumes_when == TRIED_AGAIN)
        assert "5 times within 10 minutes" in trainer.service.view.problem

    trainer.run(body)


def test_what_it_says_about_its_end_is_the_problem(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER_REFUSES)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        view = trainer.service.view
        trainer.service.want()
        await until(lambda: trainer.service.tried_in_s == 1.0)
        assert trainer.heard(TrainerFailed)
        assert view.problem == "the trainer has ended: no such device; take another"
        trainer.use(programs.TRAINER)
        clock.jump(1.0)
        await until(lambda: len([e for e in trainer.events if isinstance(e, TrainerStarted)]) == 2)
        assert view.problem == ""

    trainer.run(body)


def test_who_holds_the_memory_is_named_and_it_is_tried_more_and_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = []

    def name_holders(device: str) -> tuple[str, ...]:
        devices.append(device)
        return ("blender (6.1 GB)", "chrome (2.0 GB)")

    monkeypatch.setattr(trainer_service, "name_holders", name_holders)
    trainer = WatchedTrainer(tmp_path, programs.TRAINER_FAILS)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service = trainer.service
        service.want()
        for number in range(8):
            wait_s = MEMORY_WAIT_S * min(16, 2**number)
            await until(lambda wait_s=wait_s: service.tried_in_s == wait_s)  # type: ignore[misc]
            assert service.view.problem == (
                "there is too little memory to train; "
                "most of it is held by blender (6.1 GB), chrome (2.0 GB)"
            )
            assert service.view.resumes_when == LET_GO
            clock.jump(wait_s)
        await until(lambda: trainer.num_ends == 9)
        assert devices[:2] == ["cpu", "cpu"]
        assert service._backoff.crashes == 0, "no fault of the trainer's"
        await until(lambda: service.tried_in_s)
        trainer.use(programs.TRAINER)
        service.forgive()
        await until(lambda: service.pid)
        await until(lambda: not service.view.problem)

    trainer.run(body)


@pytest.mark.parametrize(
    ("program", "first_wait_s", "problem", "resumes_when"),
    [
        (programs.TRAINER_DISK_FULL, DISK_WAIT_S, "no space left to write it; make room", WRITABLE),
        (programs.TRAINER_WITHOUT_DATA, DATA_WAIT_S, "hf:x cannot be read", REACHABLE),
    ],
    ids=["disk", "data"],
)
def test_a_disk_or_data_that_cannot_be_had_is_waited_for_and_is_no_crash(
    tmp_path: Path, program: str, first_wait_s: float, problem: str, resumes_when: str
) -> None:
    trainer = WatchedTrainer(tmp_path, program)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service = trainer.service
        service.want()
        for number in range(7):
            wait_s = first_wait_s * min(16, 2**number)
            await until(lambda wait_s=wait_s: service.tried_in_s == wait_s)  # type: ignore[misc]
            assert service.view.problem == problem
            assert service.view.resumes_when == resumes_when
            clock.jump(wait_s)
        assert not service._backoff.is_broken

    trainer.run(body)


@pytest.mark.parametrize("is_out_of_memory", [False, True])
def test_a_kill_by_the_system_is_told_from_one_by_somebody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_out_of_memory: bool
) -> None:
    counts = iter([3, 4 if is_out_of_memory else 3])
    monkeypatch.setattr(trainer_service, "count_oom_kills", lambda: next(counts, 4))
    monkeypatch.setattr(trainer_service, "name_holders", lambda device: ())
    trainer = WatchedTrainer(tmp_path, programs.TRAINER)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.heard(TrainerStarted))
        assert trainer.service.pid is not None
        psutil.Process(trainer.service.pid).kill()
        await until(lambda: trainer.service.tried_in_s is not None)
        told = trainer.service.view.problem
        assert told == (
            "there is too little memory to train"
            if is_out_of_memory
            else "the trainer has ended: it was killed by signal 9"
        )
        assert (trainer.service._backoff.crashes == 0) is is_out_of_memory

    trainer.run(body)


def test_one_that_never_starts_is_killed_as_silent(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.DEAF)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.service.pid)
        await settle()
        await trainer.watch(clock, SILENCE_DEADLINE_S - WATCH_EVERY_S)
        await let_processes_run(20)
        assert trainer.num_ends == 0
        await trainer.watch(clock, WATCH_EVERY_S)
        await until(lambda: trainer.num_ends == 1)
        await until(lambda: trainer.service.tried_in_s is not None)
        assert trainer.service._backoff.crashes == 1
        assert "it has taken no step for 300 s" in trainer.service.view.problem

    trainer.run(body)


def test_time_that_nobody_has_watched_is_no_silence(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.DEAF)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.service.pid)
        await settle()
        for _ in range(5):  # the agent was stopped with its trainer, and goes on
            clock.jump(10 * SILENCE_DEADLINE_S)
            await settle()
        await let_processes_run(20)
        assert trainer.num_ends == 0

    trainer.run(body)


def test_answers_without_a_step_are_no_life(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER_ANSWERS_AND_NEVER_STEPS)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.heard(TrainerStarted))
        await trainer.watch(clock, 2 * SILENCE_DEADLINE_S)  # a large state is being fetched
        await let_processes_run(20)
        assert trainer.num_ends == 0
        trainer.service.send(REBASE)
        await until(lambda: len(trainer.events) == 2)
        await trainer.watch(clock, SILENCE_DEADLINE_S - WATCH_EVERY_S)
        trainer.service.send(REBASE)
        await until(lambda: len(trainer.events) == 3)
        assert trainer.num_ends == 0
        await trainer.watch(clock, WATCH_EVERY_S)
        await until(lambda: trainer.num_ends == 1)

    trainer.run(body)


def test_one_that_a_signal_has_stopped_is_told_of_and_woken(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service = trainer.service
        service.want()
        await until(lambda: trainer.heard(TrainerStarted))
        assert service.pid is not None
        process = psutil.Process(service.pid)
        process.suspend()
        await until(lambda: process.status() == psutil.STATUS_STOPPED)
        for _ in range(LOOKS_UNTIL_WOKEN - 1):
            clock.jump(LOOK_EVERY_S)
            await settle()
            assert service.is_frozen
            assert process.status() == psutil.STATUS_STOPPED
        clock.jump(LOOK_EVERY_S)
        await settle()
        assert not service.is_frozen
        service.send(REBASE)
        await until(lambda: trainer.heard(Stepped))
        assert trainer.num_ends == 0

    trainer.run(body)


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    with freezing() as made:
        yield made


@pytest.mark.slow
def test_one_that_cannot_be_killed_is_told_of_and_keeps_nobody_waiting(
    tmp_path: Path, freezer: Freezer
) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service = trainer.service
        service.want()
        await until(lambda: trainer.heard(TrainerStarted))
        service.send(REBASE)
        await until(lambda: trainer.heard(Stepped))
        assert service.pid is not None
        freezer.freeze(service.pid)
        nursery.start_soon(service.stop)
        await settle()
        clock.jump(STOP_DEADLINE_S)
        await until(lambda: service.is_stuck)
        assert not service.is_stepping
        service.want()
        await settle()
        assert trainer.num_ends == 0, "no second one beside it"
        freezer.thaw()
        await until(lambda: trainer.num_ends == 1)
        assert not service.is_stuck

    trainer.run(body)


@pytest.mark.slow
def test_an_agent_that_ends_does_not_wait_for_one_that_cannot_be_killed(
    tmp_path: Path, freezer: Freezer
) -> None:
    service = TrainerService([], tmp_path / "trainer.log", _hear_nothing, lambda: None)
    service._argv = programs.python(programs.TRAINER)
    held: list[Child[TrainerEvent]] = []

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.run)
            service.want()
            await until(lambda: service.view.device)
            assert service.pid is not None
            assert service._child is not None
            held.append(service._child)
            freezer.freeze(service.pid)
            nursery.cancel_scope.cancel()

    begun_at_s = time.monotonic()
    trio.run(main)
    assert psutil.pid_exists(held[0].pid), "it is still there"
    assert time.monotonic() - begun_at_s < END_DEADLINE_S + 5.0
    freezer.thaw()
    trio.run(held[0]._process.wait)


async def _hear_nothing(event: TrainerEvent) -> None:
    await trio.lowlevel.checkpoint()


def test_one_that_a_signal_has_stopped_saves_when_it_is_paused(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.heard(TrainerStarted))
        psutil.Process(trainer.service.pid).suspend()
        assert await trainer.stop(nursery, clock) < STOP_DEADLINE_S
        assert trainer.heard(SnapshotSaved)

    trainer.run(body)


def test_garbage_and_a_flood_count_as_crashes(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.FLOOD)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: trainer.num_ends == 1)
        await until(lambda: trainer.service._backoff.crashes == 1)

    trainer.run(body)


def test_what_cannot_be_started_is_told(tmp_path: Path) -> None:
    trainer = WatchedTrainer(tmp_path, programs.TRAINER)
    trainer.service._argv = [str(tmp_path / "nothing")]

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        trainer.service.want()
        await until(lambda: "cannot be started" in trainer.service.view.problem)
        assert await trainer.stop(nursery, clock) == 0

    trainer.run(body)
