"""The month's data budget: what is left of it is what the swarm may still send and receive.

Runs in: agent. The calendar month in UTC counts, as the books have their days. The books are
written more often while there is a budget, so that a kill forgets little of what was used. Clock
and books come in; nothing is decided here but how many bytes may go.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import trio

from p2p.swarm import Swarm
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.traffic import TrafficMeter
from volunteer.policy.data_veto import is_used_up, spare_bytes
from volunteer.stats.ledger import Ledger

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
FAREWELL_S = 5.0
"""Between the end of contributing and going offline: to say so to the others."""
MIN_WRITE_BYTES = 256 * 1024
WRITE_FRACTION = 0.001
"""Of the budget, or MIN_WRITE_BYTES: so much at most a kill leaves out of the books, and what a
second more can bring."""


def utc_clock() -> datetime:
    """Return the wall-clock time, with its zone."""
    return datetime.now(UTC)


def month_of(now: datetime) -> str:
    """Return a calendar month as the books' days begin, e.g. `2026-11`."""
    return f"{now:%Y-%m}"


def seconds_to_next_month(now: datetime) -> float:
    """Return the seconds until the next calendar month begins; `now` is in UTC."""
    is_december = now.month == 12
    begins = datetime(now.year + is_december, 1 if is_december else now.month + 1, 1, tzinfo=UTC)
    return (begins - now).total_seconds()


def allowance(used_bytes: int, budget_bytes: int) -> int | None:
    """Return how many bytes may go at the start; None: any number."""
    if not budget_bytes:
        return None
    return 0 if is_used_up(used_bytes, budget_bytes) else _left(used_bytes, budget_bytes)


def _left(used_bytes: int, budget_bytes: int) -> int:
    """Return how many bytes may go until the connections end."""
    return max(0, budget_bytes - used_bytes - spare_bytes(budget_bytes) // 2)


@dataclass(frozen=True, slots=True)
class DataUse:
    """What the policy asks for."""

    used_bytes: int = 0
    """In this month."""
    renews_in_s: float = 0.0
    """Until the next one."""


class DataBudget:
    """Counts the month's bytes, and lets the swarm have what is left."""

    def __init__(
        self,
        swarm: Swarm,
        traffic: TrafficMeter,
        keeper: Bookkeeper,
        ledger: Ledger,
        utc_now: Callable[[], datetime] = utc_clock,
    ) -> None:
        """Count what `traffic` sees; `load` comes first."""
        self._swarm = swarm
        self._traffic = traffic
        self._keeper = keeper
        self._ledger = ledger
        self._utc_now = utc_now
        self._month = ""
        self._base_bytes = 0
        """Of the month, and not of this process's counters since then."""
        self._use = DataUse()
        self._is_offline = False
        self._used_up_at_s: float | None = None

    async def load(self) -> None:
        """Read from the books what this month has used."""
        await self._begin_month(month_of(self._utc_now()))
        self._count()

    def use(self) -> DataUse:
        """Return what this month had used at the last look."""
        return self._use

    async def run(self, budget_bytes: Callable[[], int]) -> None:
        """Let the swarm have what is left, for ever.

        Args:
            budget_bytes: what the owner allows now; 0: no limit.
        """
        while True:
            await self.look(budget_bytes())
            await trio.sleep(LOOK_EVERY_S)  # noqa: TID251 - a period

    async def look(self, budget_bytes: int) -> None:
        """Count once, and tell the swarm."""
        month = month_of(self._utc_now())
        if month != self._month:
            await self._begin_month(month)
        if budget_bytes:
            step = max(MIN_WRITE_BYTES, int(WRITE_FRACTION * budget_bytes))
            if self._traffic.unwritten_bytes() >= step:
                await self._traffic.flush()
        self._count()
        self._allow(budget_bytes)

    def _count(self) -> None:
        used_bytes = self._base_bytes + self._traffic.wire_bytes()
        self._use = DataUse(used_bytes, seconds_to_next_month(self._utc_now()))

    def _allow(self, budget_bytes: int) -> None:
        used_bytes = self._use.used_bytes
        if not is_used_up(used_bytes, budget_bytes):
            self._used_up_at_s = None
            self._swarm.allow(_left(used_bytes, budget_bytes) if budget_bytes else None)
        else:
            if self._used_up_at_s is None:
                self._used_up_at_s = trio.current_time()
            is_over = trio.current_time() - self._used_up_at_s >= FAREWELL_S
            self._swarm.allow(0 if is_over else _left(used_bytes, budget_bytes))
        if self._is_offline is self._swarm.is_online:
            self._is_offline = not self._swarm.is_online
            what = "offline: the month's data budget is used up" if self._is_offline else "online"
            log.info("%s used=%d budget=%d", what, used_bytes, budget_bytes)

    async def _begin_month(self, month: str) -> None:
        """Begin to count for `month`: the next one, or another since the clock was set."""
        if self._month:
            await self._traffic.flush()
            await self._keeper.flush()
        in_books = await trio.to_thread.run_sync(self._ledger.bytes_in_month, month)
        self._base_bytes = in_books - self._traffic.wire_bytes()
        self._month = month
