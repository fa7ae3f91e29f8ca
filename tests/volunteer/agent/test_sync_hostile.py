"""What a lying neighbour says ends that exchange, and costs a bounded time and room."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from p2p.errors import RequestRefusedError
from tests.fakes.members import (
    MODULE,
    RUN_ID,
    SignedChain,
    hash_of,
    sign,
)
from tests.fakes.neighbours import Neighbour, hostile_envelopes, run
from tests.fakes.virtual_time import in_nursery, run_virtual, settle, until
from volunteer.agent.exchange import SYNC_PROTOCOL
from volunteer.agent.wire import (
    MAX_HAVE,
    MAX_SYNC_BYTES,
    PushRecords,
    SyncReply,
    SyncRequest,
    WireError,
    encode,
    parse_sync_message,
    parse_sync_reply,
)
from volunteer.rounds.records import Close


def replies(neighbour: Neighbour, reply: bytes) -> None:
    async def respond(peer_id: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return reply

    neighbour.swarm.serve(SYNC_PROTOCOL, respond, max_request_bytes=1, purpose="sync")


@pytest.mark.parametrize("kind", hostile_envelopes())
def test_hostile_pages_end_the_sync_and_nothing_else(
    neighbours: list[Neighbour], kind: str
) -> None:
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 2)
    good = chain.all()
    page = (good[0].envelope, hostile_envelopes()[kind], good[1].envelope)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        replies(other, encode(SyncReply(envelopes=page, has_more=True)))
        nursery.start_soon(one.exchange._sync_often, 10.0)
        one.exchange.sync_soon()
        await until(lambda: one.member.ids())
        await settle()
        assert one.member.ids() == {good[0].record_id}, "what came before it was good"
        other.listen()
        await other.member.keep(good)
        clock.jump(0.2)
        await settle()
        clock.jump(10.0)
        await until(lambda: one.member.ids() == other.member.ids())

    run_virtual(in_nursery(main))


@pytest.mark.parametrize(
    "reply",
    [b"", b"\x90", b"\xff" * 100, b"\x91" * 50_000, b"\x00" * (MAX_SYNC_BYTES)],
    ids=["empty", "array", "noise", "deep", "large"],
)
def test_a_reply_that_is_none_is_passed_over(neighbours: list[Neighbour], reply: bytes) -> None:
    one, other = neighbours

    async def body() -> None:
        replies(other, reply)
        with pytest.raises(WireError):
            await one.exchange._sync_with(other.peer_id)

    run(body)


def test_unsorted_pages_are_taken_all_the_same(neighbours: list[Neighbour]) -> None:
    one, other = neighbours
    chain = SignedChain()
    tip = chain.grow(chain.genesis, 5)
    page = tuple(r.envelope for r in reversed(chain.all()))

    async def body() -> None:
        replies(other, encode(SyncReply(envelopes=page)))
        await one.exchange._sync_with(other.peer_id)
        assert tip in one.member.machine.known.facts

    run(body)


def request(**changes: object) -> bytes:
    fields = {
        "run_id": RUN_ID,
        "module_id": MODULE,
        "from_height": 0,
        "have": (),
        "tip": hash_of("t"),
        "has_closed": False,
    }
    return encode(SyncRequest(**(fields | changes)))  # type: ignore[arg-type]


def test_requests_of_strangers_are_refused(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    forged = hostile_envelopes()["bad signature"]
    messages = [
        b"",
        b"\x91" * 10_000,
        request(run_id="cd" * 32),
        request(module_id="other"),
        encode(PushRecords(run_id=RUN_ID, module_id=MODULE, envelopes=(forged,))),
    ]

    async def body() -> None:
        for message in messages:
            with pytest.raises(RequestRefusedError):
                await one.exchange._respond("stranger", message)
        assert not one.member.ids()

    run(body)


def test_a_huge_list_of_what_a_stranger_has_costs_one_page(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 3)
    have = tuple(bytes.fromhex(hash_of(str(i))) for i in range(MAX_HAVE))

    async def body() -> None:
        await one.member.keep(chain.all())
        answer = await one.exchange._respond("stranger", request(have=have, from_height=2**39))
        assert len(answer) < 32 * 1024
        reply = parse_sync_reply(answer)
        assert not reply.envelopes
        assert 0 < len(reply.want) <= 512

    run(body)


def test_own_requests_are_within_the_bounds(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    for height in range(MAX_HAVE + 50):
        one.member.book._kept.add(hash_of(str(height)), height)
    message = parse_sync_message(one.pages.request(0))
    assert isinstance(message, SyncRequest)
    assert len(message.have) == MAX_HAVE
    assert bytes.fromhex(hash_of(str(MAX_HAVE + 49))) in message.have, "the newest"
    assert len(one.pages.ask_for([hash_of(str(i)) for i in range(2000)])) < MAX_SYNC_BYTES


def test_that_a_round_is_closed_is_passed_on_both_ways(neighbours: list[Neighbour]) -> None:
    one, other = neighbours
    genesis = one.member.machine.rules.genesis_id
    one.member.machine.known.closed.add(genesis)

    async def body() -> None:
        await one.exchange._sync_with(other.peer_id)
        assert other.closed == [(one.peer_id, genesis)]
        assert one.closed == []
        await other.exchange._sync_with(one.peer_id)
        assert other.closed == [(one.peer_id, genesis)] * 2

    run(body)


def test_a_close_is_not_kept(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    close = Close(
        run_id=RUN_ID, module_id=MODULE, round_index=0, author=one.peer_id, base=hash_of("b")
    )

    async def body() -> None:
        assert await one.member.book.keep(sign(close), is_own=True)
        assert not one.member.ids()

    run(body)
