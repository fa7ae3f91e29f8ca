"""Rates hold over a minute, urgent goes before bulk, and bulk is never stopped altogether."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from p2p.chunk_lanes import MAX_ASKED, MAX_BULK_ASKED, make_lanes
from p2p.chunk_plan import SECOND_ASK_AFTER_S, ChunkPlan
from p2p.flow import (
    BULK_FLOOR_BYTES_PER_S,
    BULK_SHARE,
    MAX_BULK_CREDIT_BYTES,
    QUIET_S,
    Flow,
    Priority,
    RateLimit,
    Yielding,
)
from p2p.speed import Speed

pytestmark = pytest.mark.slow

PIECE = 65_507
MINUTE_S = 60.0
RATES = [64 << 10, 1_000_000, 10_000_000]
P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test in trio's virtual time: a minute takes no time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def body() -> None:
            await test(*args, **kwargs)

        trio.run(body, clock=MockClock(autojump_threshold=0))

    return run


class Line:
    """Sends blobs of one priority for ever over a socket of some speed."""

    def __init__(self, flow: Flow, priority: Priority, bytes_per_s: float) -> None:
        self.num_bytes = 0
        self._flow = flow
        self._priority = priority
        self._bytes_per_s = bytes_per_s

    async def run(self) -> None:
        while True:
            await self._flow.wait_to_send(PIECE, self._priority)
            await trio.sleep(PIECE / self._bytes_per_s)  # noqa: TID251 -- virtual: a socket's time
            self._flow.note_written(PIECE)
            self.num_bytes += PIECE


async def sent_in(flow: Flow, duration_s: float, *lines: Line) -> list[int]:
    """Let the lines send for so long; return their bytes."""
    before = [line.num_bytes for line in lines]
    with trio.move_on_after(duration_s):
        async with trio.open_nursery() as nursery:
            for line in lines:
                nursery.start_soon(line.run)
    return [line.num_bytes - was for line, was in zip(lines, before, strict=True)]


# ---------------------------------------------------------------------------------- rates


@pytest.mark.parametrize("rate", RATES)
@in_virtual_time
async def test_the_upload_rate_holds_over_a_minute_whoever_sends(rate: int) -> None:
    flow = Flow(rate, 0)
    lines = [Line(flow, Priority.URGENT, 10 * rate) for _ in range(4)]
    lines += [Line(flow, Priority.BULK, 10 * rate) for _ in range(4)]
    sent = sum(await sent_in(flow, MINUTE_S, *lines))
    assert 0.95 * rate * MINUTE_S <= sent <= 1.05 * rate * MINUTE_S


@in_virtual_time
async def test_small_messages_do_not_wait_and_blobs_make_up_for_them() -> None:
    rate = 1_000_000
    flow = Flow(rate, 0)
    line = Line(flow, Priority.BULK, 10 * rate)
    told = 0

    async def chatter() -> None:
        nonlocal told
        while True:
            flow.note_written(1_000)
            told += 1_000
            await trio.sleep(0.005)  # noqa: TID251 -- virtual time

    async with trio.open_nursery() as nursery:
        nursery.start_soon(chatter)
        (sent,) = await sent_in(flow, MINUTE_S, line)
        nursery.cancel_scope.cancel()
    assert told == pytest.approx(200_000 * MINUTE_S, rel=0.01)
    assert sent + told == pytest.approx(rate * MINUTE_S, rel=0.05)


@pytest.mark.parametrize("rate", RATES)
@in_virtual_time
async def test_the_download_rate_holds_over_a_minute(rate: int) -> None:
    flow = Flow(0, rate)
    received = 0
    piece = flow.max_read_bytes(128 << 10)

    async def read() -> None:
        nonlocal received
        while True:
            await flow.wait_to_read()
            await trio.lowlevel.checkpoint()
            flow.note_read(piece)
            received += piece

    with trio.move_on_after(MINUTE_S):
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(read)
    assert 0.95 * rate * MINUTE_S <= received <= 1.05 * rate * MINUTE_S


@in_virtual_time
async def test_without_limits_nothing_waits() -> None:
    flow = Flow(0, 0)
    begun_at = trio.current_time()
    for priority in Priority:
        for _ in range(100):
            await flow.wait_to_send(PIECE, priority)
            flow.note_written(PIECE)
    await flow.wait_to_read()
    assert flow.max_read_bytes(1000) == 1000
    # Bulk right behind urgent bytes is the one thing that yields.
    assert trio.current_time() - begun_at <= QUIET_S + 0.1


@given(
    rate=st.integers(1, 10**9),
    steps=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0.0, 10.0)), max_size=50),
)
def test_a_limit_gives_no_byte_more_than_its_rate_and_burst(
    rate: int, steps: list[tuple[int, float]]
) -> None:
    limit, now_s, given_bytes, last = RateLimit(rate), 0.0, 0, 0
    limit.wait_s(now_s)
    for num_bytes, passed_s in steps:
        now_s += passed_s
        if limit.wait_s(now_s) == 0.0:
            limit.prepay(num_bytes, now_s)
            limit.count(num_bytes, now_s)
            given_bytes += num_bytes
            last = num_bytes
    assert given_bytes - last <= rate * (now_s + 0.25) * (1 + 1e-9)


# ------------------------------------------------------------------------------- priority


@in_virtual_time
async def test_under_a_limit_urgent_gets_nine_tenths_and_bulk_the_rest() -> None:
    rate = 2_500_000
    flow = Flow(rate, 0)
    urgent = [Line(flow, Priority.URGENT, rate) for _ in range(2)]
    bulk = [Line(flow, Priority.BULK, rate) for _ in range(2)]
    sent = await sent_in(flow, MINUTE_S, *urgent, *bulk)
    share = sum(sent[:2]) / sum(sent)
    assert 0.88 <= share <= 0.95
    assert sum(sent) == pytest.approx(rate * MINUTE_S, rel=0.05)


@in_virtual_time
async def test_bulk_has_the_line_for_itself_when_nothing_is_urgent() -> None:
    rate = 2_500_000
    flow = Flow(rate, 0)
    bulk = Line(flow, Priority.BULK, 10 * rate)
    await sent_in(flow, 5.0, Line(flow, Priority.URGENT, 10 * rate), bulk)
    (sent,) = await sent_in(flow, MINUTE_S, bulk)
    assert sent == pytest.approx(rate * MINUTE_S, rel=0.05)


@in_virtual_time
async def test_bulk_yields_to_what_is_fetched_too() -> None:
    flow = Flow(0, 0)
    bulk = Line(flow, Priority.BULK, 10_000_000)
    fetched = 0

    async def fetch() -> None:
        nonlocal fetched
        while True:
            flow.note_fetched(10_000, Priority.URGENT)
            fetched += 10_000
            await trio.sleep(0.01)  # noqa: TID251 -- virtual time

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch)
        (sent,) = await sent_in(flow, MINUTE_S, bulk)
        nursery.cancel_scope.cancel()
    assert sent == pytest.approx(BULK_SHARE * fetched + BULK_FLOOR_BYTES_PER_S * MINUTE_S, rel=0.05)


@in_virtual_time
async def test_who_trickles_does_not_stop_bulk() -> None:
    flow = Flow(0, 0)
    bulk = Line(flow, Priority.BULK, 10_000_000)

    async def trickle() -> None:
        while True:
            flow.note_fetched(1, Priority.URGENT)
            await trio.sleep(QUIET_S / 2)  # noqa: TID251 -- virtual time

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        (sent,) = await sent_in(flow, MINUTE_S, bulk)
        nursery.cancel_scope.cancel()
    assert sent >= 0.9 * BULK_FLOOR_BYTES_PER_S * MINUTE_S


def test_credit_is_bounded_and_old_credit_is_gone() -> None:
    yielding = Yielding()
    yielding.note_urgent(10**9, 0.0)
    taken = 0
    while yielding.may_go(0.1):
        yielding.take(PIECE, 0.1)
        taken += PIECE
    assert taken <= MAX_BULK_CREDIT_BYTES + 2 * PIECE
    assert yielding.may_go(0.1 + 1.5 * QUIET_S)


# ---------------------------------------------------------------------------------- lanes


@in_virtual_time
async def test_bulk_leaves_half_of_the_places_for_urgent_chunks() -> None:
    lanes = make_lanes(Flow(0, 0))
    num_bulk = sum(lanes[Priority.BULK].enter_nowait() for _ in range(MAX_ASKED))
    assert num_bulk == MAX_BULK_ASKED
    num_urgent = sum(lanes[Priority.URGENT].enter_nowait() for _ in range(2 * MAX_ASKED))
    assert num_urgent == MAX_ASKED - MAX_BULK_ASKED
    lanes[Priority.URGENT].leave()
    with trio.fail_after(1.0):
        await lanes[Priority.URGENT].enter()
    assert not lanes[Priority.BULK].enter_nowait()


@in_virtual_time
async def test_under_a_limit_fewer_chunks_are_on_their_way() -> None:
    lanes = make_lanes(Flow(0, 256 << 10))
    assert sum(lanes[Priority.URGENT].enter_nowait() for _ in range(MAX_ASKED)) == 4


@in_virtual_time
async def test_bulk_asks_for_little_while_urgent_chunks_come() -> None:
    flow = Flow(0, 0)
    lane = make_lanes(flow)[Priority.BULK]
    flow.note_fetched(PIECE, Priority.URGENT)
    assert lane.enter_nowait(), "one chunk on credit"
    assert not lane.enter_nowait()
    begun_at = trio.current_time()
    await lane.enter()
    assert trio.current_time() - begun_at >= 0.9 * QUIET_S


def test_a_chunk_is_asked_for_elsewhere_only_when_all_are_on_their_way_and_it_is_late() -> None:
    plan = ChunkPlan([0, 1])
    assert plan.take("a", 0.0) == 0
    assert plan.take("b", 0.0) == 1
    late_s = SECOND_ASK_AFTER_S + 0.1
    assert plan.take("b", late_s - 0.2) is None
    assert not plan.has_work_for("b", late_s - 0.2)
    assert plan.has_work_for("b", late_s)
    assert plan.take("b", late_s) == 0
    assert not plan.give_back("a", 0), "the other is still to deliver it"
    assert plan.give_back("b", 0)
    assert plan.take("c", late_s) == 0
    plan.end(0)
    assert not plan.give_back("c", 0)


@given(rate=st.floats(1.0, 1e9), duration_s=st.floats(0.5, 1000.0))
def test_a_steady_speed_is_told_from_the_beginning_on(rate: float, duration_s: float) -> None:
    speed, now_s, step_s = Speed(0.0), 0.0, 0.01 * duration_s
    while now_s < duration_s:
        now_s += step_s
        speed.note(round(rate * step_s), now_s)
    assert speed.bytes_per_s(now_s) == pytest.approx(rate, rel=0.6, abs=1.0 / step_s)
    assert speed.bytes_per_s(now_s + 100.0) < 0.01 * max(rate, 1.0 / step_s) + 1e-6
