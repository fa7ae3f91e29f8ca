"""The agent begins anew where its memory has grown, at most once an hour."""

from __future__ import annotations

import trio
from trio.testing import MockClock

from tests.fakes.virtual_time import in_nursery, run_virtual, settle
from volunteer.agent.memory_watch import (
    LEAST_BETWEEN_S,
    LOOK_EVERY_S,
    LOOKS_ABOVE,
    MemoryWatch,
    read_own_memory,
)

LIMIT = 300_000_000


class Machine:
    def __init__(self, last_restart_at_s: float | None = None, limit_bytes: int = LIMIT) -> None:
        self.now_s = 10_000.0
        self.held = 100_000_000
        self.restarts: list[int] = []
        self.watch = MemoryWatch(
            limit_bytes,
            last_restart_at_s,
            lambda: self.now_s,
            self.restarts.append,
            lambda: self.held,
        )

    def look(self, times: int = LOOKS_ABOVE) -> bool:
        looks = [self.watch.look() for _ in range(times)]
        return any(looks)


def test_a_peak_passes_and_what_stays_is_mended() -> None:
    machine = Machine()
    assert not machine.look(10)
    machine.held = LIMIT + 1
    assert not machine.look(LOOKS_ABOVE - 1)
    machine.held = LIMIT
    assert not machine.look(1)
    machine.held = LIMIT + 1
    assert machine.look()
    assert machine.restarts == [LIMIT + 1]


def test_it_begins_anew_once_an_hour_at_most_and_says_why_not() -> None:
    machine = Machine(last_restart_at_s=10_000.0 - 720)
    machine.held = 412_000_000
    assert not machine.look()
    assert machine.watch.note() == (
        "412 MB, above 300 MB (`agent_memory_limit_bytes`); the agent began anew 12 min ago, and"
        " does so once in 60 min at most"
    )
    machine.held = 1
    assert not machine.look(1)
    assert machine.watch.note() == ""
    machine.held = 412_000_000
    machine.now_s = 10_000.0 - 720 + LEAST_BETWEEN_S
    assert machine.look()


def test_without_a_limit_it_never_does() -> None:
    machine = Machine(limit_bytes=0)
    machine.held = 10**12
    assert not machine.look(10)
    assert machine.watch.note() == ""


def test_the_task_looks_again_and_again_and_ends() -> None:
    machine = Machine()
    machine.held = LIMIT + 1

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        nursery.start_soon(machine.watch.run)
        for _ in range(LOOKS_ABOVE):
            assert machine.restarts == []
            await settle()
            clock.jump(LOOK_EVERY_S)

    run_virtual(in_nursery(main))
    assert machine.restarts == [LIMIT + 1]


def test_a_process_holds_some_memory() -> None:
    assert read_own_memory() > 1_000_000
