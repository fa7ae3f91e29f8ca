"""Gossip only shortens the wait: records and heartbeats, checked before they are passed on."""

from __future__ import annotations

import functools

import pytest
import trio
from trio.testing import MockClock

from tests.fakes.members import (
    MODULE,
    RUN_ID,
    SignedChain,
    hash_of,
    identity,
    sign,
)
from tests.fakes.neighbours import Neighbour, hostile_envelopes
from tests.fakes.virtual_time import in_nursery, run_virtual, settle, until
from volunteer.agent import exchange as exchange_module
from volunteer.agent.exchange import PERIODS_SETTLED
from volunteer.agent.wire import (
    Heartbeat,
    encode,
    parse_heartbeat,
)
from volunteer.rounds.records import Leaving


def heartbeat(**changes: object) -> bytes:
    fields = {
        "run_id": RUN_ID,
        "module_id": MODULE,
        "tip": hash_of("t"),
        "round_index": 3,
        "state_hash": hash_of("s"),
        "is_contributing": True,
        "tokens_per_s": 10.0,
        "loss": None,
        "addrs": ("/ip4/127.0.0.1/tcp/1",),
    }
    return encode(Heartbeat(**(fields | changes)))  # type: ignore[arg-type]


def test_gossip_is_checked_before_it_is_passed_on(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 1)
    signed = chain.all()[0]

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        nursery.start_soon(one.exchange.run, 1e6, lambda: None)
        await settle()
        topic = f"allmende/1/{RUN_ID}/{MODULE}"
        deliver = one.swarm.deliver
        assert await deliver(f"{topic}/records", "p", signed.envelope)
        assert one.member.ids() == {signed.record_id}
        for bad in hostile_envelopes().values():
            assert not await deliver(f"{topic}/records", "p", bad)
        assert await deliver(f"{topic}/heartbeats", "p", heartbeat())
        assert one.swarm.remembered == {"p": ("/ip4/127.0.0.1/tcp/1",)}
        for bad in (b"", b"\x91" * 4000, heartbeat(run_id="cd" * 32), heartbeat(module_id="o")):
            assert not await deliver(f"{topic}/heartbeats", "q", bad)
        assert await deliver(f"{topic}/heartbeats", one.peer_id, heartbeat())
        assert set(one.exchange.members()) == {"p"}, "not oneself"

    run_virtual(in_nursery(main))


def test_members_are_those_heard_lately(
    neighbours: list[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = neighbours
    monkeypatch.setattr(exchange_module, "now_s", trio.current_time)

    async def main(clock: MockClock) -> None:
        await one.exchange._on_heartbeat("p", heartbeat())
        clock.jump(exchange_module.HEARD_FOR_S - 1)
        await one.exchange._on_heartbeat("q", heartbeat())
        assert set(one.exchange.members()) == {"p", "q"}
        clock.jump(2)
        assert set(one.exchange.members()) == {"q"}

    run_virtual(main)


def test_an_unknown_tip_makes_a_sync_come_soon(neighbours: list[Neighbour]) -> None:
    one, other = neighbours
    chain = SignedChain()
    tip = chain.grow(chain.genesis, 1)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        await other.member.keep(chain.all())
        nursery.start_soon(one.exchange._sync_often, 1e6)
        await settle()
        genesis = one.member.machine.rules.genesis_id
        await one.exchange._on_heartbeat(other.peer_id, heartbeat(tip=genesis))
        await settle()
        assert not one.member.ids(), "nothing new in that"
        await one.exchange._on_heartbeat(other.peer_id, heartbeat(tip=tip))
        await until(lambda: tip in one.member.machine.known.facts)

    run_virtual(in_nursery(main))


def test_heartbeats_are_sent_once_there_is_something_to_say(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    beats: list[Heartbeat | None] = [None]

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        nursery.start_soon(one.exchange._send_heartbeats, lambda: beats[0])
        await settle()
        assert not one.swarm.published
        beats[0] = parse_heartbeat(heartbeat())
        clock.jump(3.0)
        await settle()
        assert [payload for _, payload in one.swarm.published] == [heartbeat()]
        clock.jump(1.0)
        await settle()
        assert len(one.swarm.published) == 1, "two seconds at least"

    run_virtual(in_nursery(main))


def test_in_long_rounds_heartbeats_are_few_but_a_newcomer_gets_one(
    neighbours: list[Neighbour],
) -> None:
    one, _ = neighbours
    round_s = 800.0

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        say = functools.partial(parse_heartbeat, heartbeat())
        nursery.start_soon(functools.partial(one.exchange.run, 1e6, say, round_s=round_s))
        await settle()
        assert len(one.swarm.published) == 1
        # Of two members, four a round together.
        clock.jump(0.7 * round_s / 2)
        await settle()
        assert len(one.swarm.published) == 1
        clock.jump(0.6 * round_s / 2)
        await settle()
        assert len(one.swarm.published) == 2
        one.exchange.note_neighbour()
        clock.jump(1.0)
        await settle()
        assert len(one.swarm.published) == 2, "two seconds at least"
        clock.jump(2.1)
        await settle()
        assert len(one.swarm.published) == 3

    run_virtual(in_nursery(main))


def test_a_settled_member_asks_less_often_and_at_once_when_it_wants_something(
    neighbours: list[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = neighbours
    asked: list[str] = []
    settled = [True]

    async def note(peer_id: str) -> None:
        await trio.lowlevel.checkpoint()
        asked.append(peer_id)

    monkeypatch.setattr(one.exchange, "_sync_with", note)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        say_nothing, is_settled = (lambda: None), (lambda: settled[0])
        run = functools.partial(one.exchange.run, 10.0, say_nothing, is_settled=is_settled)
        nursery.start_soon(run)
        await settle()

        async def pass_periods(num_periods: int) -> int:
            before = len(asked)
            for _ in range(num_periods):
                for part_s in (0.25, 10.0):  # the pause after a sync, and the period
                    clock.jump(part_s)
                    await settle()
            return len(asked) - before

        assert await pass_periods(PERIODS_SETTLED - 1) == 0
        assert await pass_periods(1) == 1
        assert set(asked) == {other.peer_id}
        one.exchange.want("5a" * 32)
        clock.jump(0.3)
        await settle()
        assert len(asked) == 2
        settled[0] = False
        assert await pass_periods(4) == 4

    run_virtual(in_nursery(main))


def test_where_gossip_fails_no_sync_is_passed_over(
    neighbours: list[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = neighbours
    other.listen()
    monkeypatch.setattr(exchange_module, "now_s", trio.current_time)
    period_s, round_s = 10.0, 333.0
    sync_with, num_syncs, num_ended = one.exchange._sync_with, 0, 0

    async def count(peer_id: str) -> None:
        nonlocal num_syncs, num_ended
        num_syncs += 1
        await sync_with(peer_id)
        num_ended += 1

    monkeypatch.setattr(one.exchange, "_sync_with", count)
    run = functools.partial(
        one.exchange.run, period_s, lambda: None, round_s=round_s, is_settled=lambda: True
    )

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        nursery.start_soon(run)
        await settle()

        async def pass_periods(num_periods: int) -> int:
            before = num_syncs
            for _ in range(num_periods):
                for part_s in (0.25, period_s):
                    clock.jump(part_s)
                    await settle()
                    await until(lambda: num_ended == num_syncs)  # a sync reads files
                    await settle()
            return num_syncs - before

        assert await pass_periods(PERIODS_SETTLED) == 1, "nothing was missed"
        chain = SignedChain()
        chain.grow(chain.genesis, 1)
        await other.member.keep(chain.all())
        assert await pass_periods(PERIODS_SETTLED) == 1
        assert one.member.ids() == other.member.ids()
        assert await pass_periods(4) == 4, "gossip had not brought it"
        clock.jump(exchange_module.DISTRUST_ROUNDS * round_s)
        await settle()
        assert await pass_periods(PERIODS_SETTLED + 1) <= 2

    run_virtual(in_nursery(main))


def test_a_sync_that_was_faster_than_gossip_is_no_failure(
    neighbours: list[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = neighbours
    monkeypatch.setattr(exchange_module, "now_s", trio.current_time)
    chain = SignedChain()
    chain.grow(chain.genesis, 1)
    first, second = chain.all()[:2]

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        run = functools.partial(one.exchange.run, 1e6, lambda: None, round_s=60.0)
        nursery.start_soon(functools.partial(run, is_settled=lambda: True))
        await settle()
        topic = f"allmende/1/{RUN_ID}/{MODULE}/records"
        for signed in (first, second):
            await one.exchange._take_synced(signed)
        assert await one.swarm.deliver(topic, "p", first.envelope)
        assert one.exchange._may_pass_over(), "the other may still come"
        clock.jump(exchange_module.GOSSIP_LATE_S)
        assert not one.exchange._may_pass_over(), "it has not"
        clock.jump(exchange_module.DISTRUST_ROUNDS * 60.0)
        assert one.exchange._may_pass_over()
        await one.exchange._take_synced(first)
        clock.jump(exchange_module.GOSSIP_LATE_S)
        assert one.exchange._may_pass_over(), "it was known"

    run_virtual(in_nursery(main))


def test_sign_is_what_verify_accepts(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    record = Leaving(
        run_id=RUN_ID, module_id=MODULE, round_index=0, author=one.peer_id, base=hash_of("b")
    )
    signed = one.member.book.sign(record)
    assert one.member.book.verify(signed.envelope) == signed == sign(record)
    assert identity(1).peer_id == one.peer_id
