"""Child processes that misbehave end, and leave neither zombie nor orphan."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import trio
from trio.testing import MockClock

from tests.fakes import child_programs as programs
from tests.fakes.virtual_time import in_nursery, let_processes_run, run_virtual, until
from volunteer.agent import child as child_module
from volunteer.agent.child import END_DEADLINE_S, Child
from volunteer.messages import (
    AggregatorEvent,
    AggregatorStarted,
    EvaluateState,
    StateEvaluated,
    aggregator_event_decoder,
)


async def start(script: str, tmp_path: Path) -> Child[AggregatorEvent]:
    return await Child.start(
        programs.python(script), tmp_path / "child.log", aggregator_event_decoder, "fake"
    )


class Ear:
    """Takes events."""

    def __init__(self) -> None:
        self.events: list[AggregatorEvent] = []

    async def hear(self, event: AggregatorEvent) -> None:
        self.events.append(event)


def test_commands_and_events_pass(tmp_path: Path) -> None:
    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        child, ear = await start(programs.AGGREGATOR, tmp_path), Ear()
        nursery.start_soon(child.run, ear.hear)
        for i in range(50):
            child.send(EvaluateState(request_id=i, state_hash=f"s{i}"))
        await until(lambda: len(ear.events) == 51)
        assert isinstance(ear.events[0], AggregatorStarted)
        answers = [e for e in ear.events if isinstance(e, StateEvaluated)]
        assert [a.request_id for a in answers] == list(range(50))
        assert answers[7].state_hash == "s7"

    run_virtual(in_nursery(body))


def test_a_crash_gives_its_exit_status(tmp_path: Path) -> None:
    async def main(clock: MockClock) -> int:
        child = await start(programs.CRASHES_AT_ONCE, tmp_path)
        child.send(EvaluateState(request_id=1, state_hash="s"))
        status = await child.run(Ear().hear)
        assert not psutil.pid_exists(child.pid)
        return status

    assert run_virtual(main) == 3


def test_garbage_is_logged_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        child, ear = await start(programs.GARBAGE, tmp_path), Ear()
        nursery.start_soon(child.run, ear.hear)
        await until(lambda: ear.events)
        assert isinstance(ear.events[0], AggregatorStarted)

    run_virtual(in_nursery(body))
    assert len([r for r in caplog.records if "no event" in r.message]) == 6


def test_a_line_without_end_kills_its_writer_at_once(tmp_path: Path) -> None:
    async def main(clock: MockClock) -> None:
        child, ear = await start(programs.FLOOD, tmp_path), Ear()
        assert await child.run(ear.hear) < 0
        assert trio.current_time() == 0, "without waiting"
        assert not psutil.pid_exists(child.pid)
        assert not ear.events

    run_virtual(main)


def test_a_child_that_says_no_more_is_killed(tmp_path: Path) -> None:
    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        child, ended = await start(programs.CLOSES_STDOUT, tmp_path), trio.Event()

        async def run() -> None:
            assert await child.run(Ear().hear) < 0
            ended.set()

        nursery.start_soon(run)
        process = psutil.Process(child.pid)
        await until(lambda: process.num_fds() == 2)
        clock.jump(END_DEADLINE_S * 0.9)
        await let_processes_run(5)
        assert not ended.is_set(), "it may yet end by itself"
        clock.jump(END_DEADLINE_S * 0.2)
        await until(ended.is_set)
        assert not psutil.pid_exists(child.pid)

    run_virtual(in_nursery(body))


@pytest.mark.parametrize("script", [programs.SILENT, programs.DEAF, programs.FLOOD])
def test_cancelling_leaves_no_process(tmp_path: Path, script: str) -> None:
    async def main(clock: MockClock) -> None:
        child = await start(script, tmp_path)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(child.run, Ear().hear)
            await trio.lowlevel.checkpoint()
            for i in range(2000):  # more than a pipe holds, and nobody reads
                child.send(EvaluateState(request_id=i, state_hash="s" * 200))
            await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert not psutil.pid_exists(child.pid)

    run_virtual(main)


def test_a_log_that_has_grown_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "MAX_LOG_BYTES", 10)
    log_file = tmp_path / "child.log"
    log_file.write_text("many old lines\n")

    async def main(clock: MockClock) -> None:
        child = await start("sys.stderr.write('new')", tmp_path)
        await child.run(Ear().hear)

    run_virtual(main)
    assert log_file.read_text() == "new"
    assert (tmp_path / "child.log.1").read_text() == "many old lines\n"
