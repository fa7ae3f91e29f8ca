"""The aggregator is started when wanted, asked, lost, and given up, and nobody waits for ever."""

from __future__ import annotations

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
from volunteer.agent.aggregator_service import (
    SILENCE_DEADLINE_S,
    AggregatorLostError,
    AggregatorRefusedError,
    AggregatorService,
)
from volunteer.agent.backoff import MAX_CRASHES, QUARANTINE_S
from volunteer.messages import AggregatorEvent, EvaluateState, StateEvaluated


def make(tmp_path: Path, script: str) -> AggregatorService:
    service = AggregatorService(tmp_path, "dense", tmp_path / "aggregator.log")
    service._argv = programs.python(script)
    return service


async def ask(service: AggregatorService) -> AggregatorEvent:
    return await service.ask(lambda i: EvaluateState(request_id=i, state_hash="s"))


class Question:
    """One question in a task of its own."""

    def __init__(self, service: AggregatorService, nursery: trio.Nursery) -> None:
        self.answer: AggregatorEvent | Exception | None = None
        self._service = service
        nursery.start_soon(self._ask)

    async def _ask(self) -> None:
        try:
            self.answer = await ask(self._service)
        except (AggregatorLostError, AggregatorRefusedError) as error:
            self.answer = error


def run(
    service: AggregatorService,
    body: Callable[[trio.Nursery, MockClock], Awaitable[None]],
) -> None:
    async def with_service(nursery: trio.Nursery, clock: MockClock) -> None:
        nursery.start_soon(service.run)
        await settle(3)
        await body(nursery, clock)

    run_virtual(in_nursery(with_service))


def test_it_is_started_and_answers_each_its_own(tmp_path: Path) -> None:
    service = make(tmp_path, programs.AGGREGATOR)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        questions = [Question(service, nursery) for _ in range(10)]
        await settle()
        assert service.pid is None, "not wanted yet"
        service.want()
        await until(lambda: all(q.answer for q in questions))
        ids = [q.answer.request_id for q in questions if isinstance(q.answer, StateEvaluated)]
        assert sorted(ids) == list(range(1, 11))
        assert not service._answers
        assert not service._replies

    run(service, body)


def test_a_refusal_carries_message_and_hint(tmp_path: Path) -> None:
    service = make(tmp_path, programs.REFUSING_AGGREGATOR)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service.want()
        with pytest.raises(AggregatorRefusedError, match="no such state") as caught:
            await ask(service)
        assert caught.value.hint == "look elsewhere"

    run(service, body)


def test_a_crash_loses_what_was_asked_and_only_that(tmp_path: Path) -> None:
    service = make(tmp_path, programs.AGGREGATOR_CRASHES_WHEN_ASKED)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service.want()
        with pytest.raises(AggregatorLostError):
            await ask(service)
        assert service.pid is None
        service._argv = programs.python(programs.AGGREGATOR)
        question = Question(service, nursery)
        await settle()
        assert question.answer is None, "it is given a second"
        clock.jump(1.0)
        await until(lambda: question.answer)
        assert isinstance(question.answer, StateEvaluated)

    run(service, body)


def test_five_crashes_give_up_until_the_owner_asks_again(tmp_path: Path) -> None:
    service = make(tmp_path, programs.CRASHES_AT_ONCE)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service.want()
        question = Question(service, nursery)
        while question.answer is None:
            clock.jump(1.0)
            await let_processes_run()
        assert isinstance(question.answer, AggregatorLostError)
        assert service.is_broken
        assert service._backoff.crashes == MAX_CRASHES
        clock.jump(1000)
        service.stop()
        service.want()
        await settle()
        assert service.pid is None, "not by itself, and not since the machine was idle again"
        assert service.tried_in_s == QUARANTINE_S - 1000
        service._argv = programs.python(programs.AGGREGATOR)
        service.forgive()
        assert isinstance(await ask(service), StateEvaluated)
        assert not service.is_broken
        assert service.tried_in_s is None

    run(service, body)


def test_what_cannot_be_started_counts_as_crashed(tmp_path: Path) -> None:
    service = make(tmp_path, programs.AGGREGATOR)
    service._argv = [str(tmp_path / "nothing")]

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service.want()
        await until(lambda: service._backoff.crashes == 1)
        service._argv = programs.python(programs.AGGREGATOR)
        await settle()
        clock.jump(1.0)
        assert isinstance(await ask(service), StateEvaluated)

    run(service, body)


def test_stopping_ends_it_at_once_and_tells_who_asked(tmp_path: Path) -> None:
    service = make(tmp_path, "say(type='started')\ntime.sleep(1000)")

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service.want()
        question = Question(service, nursery)
        await until(lambda: service._answers)
        pid = service.pid
        assert pid is not None
        service.stop()
        await service.wait_gone()
        assert not psutil.pid_exists(pid)
        await until(lambda: question.answer)
        assert isinstance(question.answer, AggregatorLostError)
        assert not psutil.pid_exists(pid)
        clock.jump(1000)
        await settle()
        assert service.pid is None
        assert service._backoff.crashes == 0, "no crash: it was asked to"

    run(service, body)


@pytest.mark.parametrize("num_turns", range(6))
def test_wanted_and_stopped_in_one_breath_does_not_run(tmp_path: Path, num_turns: int) -> None:
    service = make(tmp_path, programs.AGGREGATOR)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service.want()
        await settle(num_turns)
        service.stop()
        await until(lambda: len(nursery.child_tasks) == 1)
        await let_processes_run(20)
        await until(lambda: service.pid is None)
        assert not psutil.Process().children()

    run(service, body)


def test_cancelling_leaves_no_process(tmp_path: Path) -> None:
    service = make(tmp_path, programs.DEAF)

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service.want()
        await until(lambda: service.pid)

    run(service, body)
    assert not psutil.Process().children()


def test_one_that_answers_nobody_is_killed(tmp_path: Path) -> None:
    service = make(tmp_path, "say(type='started')\ntime.sleep(1000)")

    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        service.want()
        question = Question(service, nursery)
        await until(lambda: service._answers)
        await settle()
        clock.jump(SILENCE_DEADLINE_S - 1)
        await let_processes_run(5)
        assert question.answer is None
        clock.jump(1)
        await until(lambda: question.answer)
        assert isinstance(question.answer, AggregatorLostError)
        assert service._backoff.crashes == 1

    run(service, body)
