"""The month's data budget: counted over restarts and months, and never gone beyond."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import trio
from trio.testing import MockClock

from p2p.swarm import Swarm
from tests.fakes.members import rules
from tests.fakes.virtual_time import in_nursery, run_virtual, settle
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.data_budget import (
    FAREWELL_S,
    MIN_WRITE_BYTES,
    DataBudget,
    allowance,
    seconds_to_next_month,
)
from volunteer.agent.traffic import TrafficMeter
from volunteer.policy.data_veto import is_used_up, spare_bytes
from volunteer.rounds.knowledge import Knowledge
from volunteer.stats.ledger import Ledger

MB = 1_000_000
BUDGET = 100 * MB
MARGIN = spare_bytes(BUDGET) // 2
"""For what is on its way when the connections end."""
NOVEMBER = datetime(2026, 11, 30, 23, 59, 0, tzinfo=UTC)


class Machine:
    """One agent's network, books and clock."""

    def __init__(self, folder: Path, now: datetime = NOVEMBER) -> None:
        self.now = now
        self.wire = 0
        self.allowed: list[int | None] = []
        self.ledger = Ledger(
            folder / "stats.sqlite", utc_now=lambda: f"{self.now:%Y-%m-%dT%H:%M:%SZ}"
        )
        self.swarm = SimpleNamespace(
            statistics=lambda: SimpleNamespace(
                sent_bytes_by_purpose={"states": self.wire // 2},
                received_bytes_by_purpose={},
                wire_sent_bytes=self.wire,
                wire_received_bytes=0,
            ),
            allow=self._allow,
            is_online=True,
        )
        # The books are written in order, as Bookkeeper does; here at once.
        keeper = cast(
            "Bookkeeper",
            SimpleNamespace(queue=lambda write: write(), flush=trio.lowlevel.checkpoint),
        )
        swarm = cast("Swarm", self.swarm)
        self.traffic = TrafficMeter(swarm, keeper, self.ledger, Knowledge(rules()))
        self.budget = DataBudget(swarm, self.traffic, keeper, self.ledger, lambda: self.now)

    def _allow(self, num_bytes: int | None) -> None:
        self.allowed.append(num_bytes)
        self.swarm.is_online = num_bytes is None or num_bytes > 0

    @property
    def used(self) -> int:
        return self.budget.use().used_bytes


def on(machine: Machine, body: Callable[[MockClock], object]) -> None:
    """Run `body`, a coroutine function, once the books are read."""

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        await machine.budget.load()
        await body(clock)  # type: ignore[misc]

    run_virtual(in_nursery(main))


def test_what_is_left_is_what_may_go_and_in_the_end_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    async def body(clock: MockClock) -> None:
        machine.wire = 40 * MB
        await machine.budget.look(BUDGET)
        assert machine.allowed[-1] == 60 * MB - MARGIN
        machine.wire = BUDGET - spare_bytes(BUDGET)
        await machine.budget.look(BUDGET)
        assert machine.allowed[-1] == spare_bytes(BUDGET) - MARGIN  # for the farewell
        assert is_used_up(machine.used, BUDGET)
        clock.jump(FAREWELL_S)
        await machine.budget.look(BUDGET)
        assert machine.allowed[-1] == 0
        await machine.budget.look(2 * BUDGET)  # the owner allows more
        assert machine.allowed[-1] == 2 * BUDGET - machine.wire - MARGIN
        await machine.budget.look(0)
        assert machine.allowed[-1] is None

    on(machine, body)


def test_the_next_month_begins_anew(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    async def body(clock: MockClock) -> None:
        machine.wire = BUDGET
        for _ in range(2):
            await machine.budget.look(BUDGET)
            clock.jump(FAREWELL_S)
        assert machine.allowed[-1] == 0
        assert machine.budget.use().renews_in_s == 60.0
        machine.now += timedelta(seconds=61)
        await machine.budget.look(BUDGET)
        # What the last second brought counts for the new month.
        assert machine.used < MB
        assert machine.allowed[-1] == BUDGET - machine.used - MARGIN
        assert machine.ledger.bytes_in_month("2026-11") + machine.used == BUDGET
        machine.now -= timedelta(seconds=61)  # the clock is set back: November is used up
        for _ in range(2):
            await machine.budget.look(BUDGET)
            clock.jump(FAREWELL_S)
        assert machine.allowed[-1] == 0

    on(machine, body)


def test_a_restart_goes_on_where_a_kill_ended_it(tmp_path: Path) -> None:
    first = Machine(tmp_path)

    async def body(clock: MockClock) -> None:
        for _ in range(200):
            first.wire += 300_000
            await first.budget.look(BUDGET)

    on(first, body)
    first.ledger.close()  # without a last flush
    second = Machine(tmp_path)
    on(second, lambda clock: second.budget.look(BUDGET))
    assert first.wire - MIN_WRITE_BYTES < second.used <= first.wire
    assert second.allowed[-1] == BUDGET - second.used - MARGIN
    assert allowance(second.used, BUDGET) == BUDGET - second.used - MARGIN
    assert allowance(BUDGET, BUDGET) == 0
    assert allowance(BUDGET, 0) is None


def test_without_a_budget_the_books_are_written_once_a_minute(tmp_path: Path) -> None:
    machine = Machine(tmp_path)

    async def body(clock: MockClock) -> None:
        machine.wire = BUDGET
        await machine.budget.look(0)
        assert machine.ledger.bytes_in_month("2026-11") == 0
        assert machine.used == BUDGET

    on(machine, body)


def test_the_task_follows_what_the_owner_allows(tmp_path: Path) -> None:
    machine, allowed = Machine(tmp_path), [0]

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        await machine.budget.load()
        nursery.start_soon(machine.budget.run, lambda: allowed[0])
        await settle()
        assert machine.allowed == [None]
        allowed[0] = BUDGET
        clock.jump(1.0)
        await settle()
        assert machine.allowed == [None, BUDGET - MARGIN]
        nursery.cancel_scope.cancel()

    run_virtual(in_nursery(main))


@pytest.mark.parametrize(
    ("now", "left_s"),
    [
        (datetime(2026, 12, 31, 23, 0, tzinfo=UTC), 3600.0),
        (datetime(2027, 2, 1, tzinfo=UTC), 28 * 86400.0),
        (datetime(2028, 2, 1, tzinfo=UTC), 29 * 86400.0),
        (datetime(2026, 4, 30, 23, 59, 59, 500_000, tzinfo=UTC), 0.5),
    ],
)
def test_months_have_their_own_lengths(now: datetime, left_s: float) -> None:
    assert seconds_to_next_month(now) == left_s


def test_a_small_budget_keeps_back_little() -> None:
    assert spare_bytes(MB) == 50_000
    assert spare_bytes(10**12) == 1024 * 1024
    assert not is_used_up(10**15, 0)
    assert not is_used_up(MB - spare_bytes(MB) - 1, MB)
    assert is_used_up(MB - spare_bytes(MB), MB)
