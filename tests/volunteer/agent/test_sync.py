"""Anti-entropy: two books exchange until they are equal, whatever a neighbour says."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from p2p.errors import RequestRefusedError
from tests.fakes.members import (
    MODULE,
    PEOPLE,
    RUN_ID,
    Member,
    SignedChain,
    hash_of,
    identity,
    sign,
)
from tests.fakes.network import FakeNetwork, FakeSwarm
from tests.fakes.virtual_time import in_nursery, run_virtual, settle, until
from volunteer.agent import exchange as exchange_module
from volunteer.agent import sync_pages as sync_pages_module
from volunteer.agent.exchange import SYNC_PROTOCOL, Exchange
from volunteer.agent.peer_memory import PeerMemory
from volunteer.agent.record_book import SignedRecord
from volunteer.agent.sync_pages import OVERLAP_HEIGHTS, SyncPages
from volunteer.agent.wire import (
    MAX_HAVE,
    MAX_SYNC_BYTES,
    PAGE_BYTES,
    Heartbeat,
    PushRecords,
    SyncReply,
    SyncRequest,
    WireError,
    encode,
    parse_heartbeat,
    parse_sync_message,
    parse_sync_reply,
)
from volunteer.errors import StorageFullError
from volunteer.rounds.records import Close, Leaving

NetworkOf = Callable[..., "Neighbour"]


@dataclass
class Neighbour:
    """One member on a fake network, with its real exchange."""

    member: Member
    swarm: FakeSwarm
    memory: PeerMemory
    closed: list[tuple[str, str]] = field(default_factory=list)
    is_full: bool = False
    pages: SyncPages = field(init=False)
    exchange: Exchange = field(init=False)

    def __post_init__(self) -> None:
        self.pages = SyncPages(self.member.machine, self.member.book)
        self.exchange = Exchange(
            self.swarm.as_swarm,
            self.member.book,
            self.pages,
            self._take,
            lambda peer, base: self.closed.append((peer, base)),
            self.memory,
        )

    async def _take(self, signed: SignedRecord) -> None:
        if not self.is_full:
            await self.member.keep([signed])

    @property
    def peer_id(self) -> str:
        return self.swarm.peer_id

    def listen(self) -> None:
        self.swarm.serve(
            SYNC_PROTOCOL,
            self.exchange._respond,
            max_request_bytes=MAX_SYNC_BYTES,
            purpose="sync",
        )


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def neighbours(tmp_path: Path, network: FakeNetwork) -> Iterator[list[Neighbour]]:
    made = []
    for number, who in enumerate(PEOPLE[:2]):
        member = Member(tmp_path / str(number), who)
        swarm = network.join(who.peer_id)
        made.append(Neighbour(member, swarm, PeerMemory(tmp_path / f"{number}.json")))
        made[-1].listen()
    yield made
    for neighbour in made:
        neighbour.member.log.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main(clock: MockClock) -> None:
        await body()

    run_virtual(main)


def test_one_sync_makes_two_books_equal(neighbours: list[Neighbour]) -> None:
    one, other = neighbours
    chain = SignedChain()
    fork = chain.grow(chain.genesis, 3)
    chain.grow(fork, 2)
    records = chain.all()

    async def body() -> None:
        await one.member.keep(records[::2] + records[:9])
        await other.member.keep(records[1::2] + records[:3])
        await one.exchange._sync_with(other.peer_id)
        assert one.member.ids() == other.member.ids() == {r.record_id for r in records}

    run(body)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_two_books_become_equal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    chain = SignedChain()
    tips = [chain.genesis]
    for _ in range(data.draw(st.integers(1, 6))):
        parent = data.draw(st.sampled_from(tips))
        tips.append(chain.grow(parent, 1, PEOPLE[: data.draw(st.integers(1, 3))]))
    records = chain.all()
    owners = data.draw(st.lists(st.integers(0, 3), min_size=len(records), max_size=len(records)))
    network, folder = FakeNetwork(), tmp_path_factory.mktemp("books")

    async def body() -> None:
        made = []
        for number, who in enumerate(PEOPLE[:2]):
            member = Member(folder / str(number), who)
            swarm = network.join(who.peer_id)
            made.append(Neighbour(member, swarm, PeerMemory(folder / f"{number}.json")))
            made[-1].listen()
            await member.keep(r for r, o in zip(records, owners, strict=True) if o & (1 << number))
        for _ in range(4):
            await made[0].exchange._sync_with(made[1].peer_id)
        known = {r.record_id for r, o in zip(records, owners, strict=True) if o}
        assert made[0].member.ids() == made[1].member.ids() == known
        for neighbour in made:
            neighbour.member.log.close()

    run(body)


def test_many_records_come_page_by_page(
    neighbours: list[Neighbour], network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_pages_module, "PAGE_BYTES", 2000)
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 30)
    records = chain.all()

    async def body() -> None:
        await other.member.keep(records)
        await one.exchange._sync_with(other.peer_id)
        assert one.member.ids() == other.member.ids()
        total = sum(len(r.envelope) for r in records)
        assert network.num_requests < 2 * total / 2000
        assert network.sent_bytes < 4 * total, "no page again and again"

    run(body)


def test_a_page_reads_only_what_it_takes(
    neighbours: list[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_pages_module, "PAGE_BYTES", 1000)
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 20)
    reads: list[str] = []
    get = other.member.log.get

    def count(record_id: str) -> bytes:
        reads.append(record_id)
        return get(record_id)

    monkeypatch.setattr(other.member.log, "get", count)

    async def body() -> None:
        await other.member.keep(chain.all())
        answer = await other.pages.answer(one.pages.request(0))
        assert answer.reply.has_more
        assert len(reads) == len(answer.reply.envelopes) + 1

    run(body)


def test_pages_are_by_height_and_within_their_size(neighbours: list[Neighbour]) -> None:
    _, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 12)

    async def body() -> None:
        await other.member.keep(reversed(chain.all()))
        answer = await other.pages.answer(
            SyncPages(other.member.machine, other.member.book).request(10**6)
        )
        assert not answer.reply.envelopes
        page, has_more = await other.member.book.page_of(other.member.ids(), PAGE_BYTES)
        heights = [other.member.book.verify(e).record.round_index for e in page]
        assert heights == sorted(heights)
        assert not has_more
        tiny, has_more = await other.member.book.page_of(other.member.ids(), 1)
        assert (len(tiny), has_more) == (1, True), "a page is never empty"
        nothing, has_more = await other.member.book.page_of([hash_of("unknown")], 1)
        assert (nothing, has_more) == ((), False)

    run(body)


def test_wanted_records_are_asked_for_by_name(neighbours: list[Neighbour]) -> None:
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 2)
    wanted = chain.all()[0]

    async def body() -> None:
        await other.member.keep([wanted])
        one.exchange.want(wanted.record_id)
        one.exchange.want(hash_of("nobody has it"))
        one.pages.first_height = lambda: 10**6  # type: ignore[method-assign]
        await one.exchange._sync_with(other.peer_id)
        assert one.member.ids() == {wanted.record_id}
        assert not one.exchange._wanted

    run(body)


def test_a_deep_branch_is_found_by_stepping_back(neighbours: list[Neighbour]) -> None:
    one, other = neighbours
    ours, theirs = SignedChain(), SignedChain()
    ours.grow(ours.genesis, 40)
    branch = theirs.grow(theirs.genesis, 38, PEOPLE[2:4])

    async def body() -> None:
        await one.member.keep(ours.all())
        one.member.machine.final_id = next(
            i for i, f in one.member.machine.known.facts.items() if f.height == 38
        )
        await other.member.keep(theirs.all())
        heights = []
        for _ in range(10):
            heights.append(one.pages.first_height())
            await one.exchange._sync_with(other.peer_id)
            if branch in one.member.machine.known.facts:
                break
        assert branch in one.member.machine.known.facts
        assert len(heights) < 6, "each step is twice as long"
        one.pages.first_height()
        assert one.pages.first_height() == 38 - OVERLAP_HEIGHTS, "nothing waits any more"

    run(body)


def test_a_commit_on_nothing_does_not_make_every_sync_a_full_one(
    neighbours: list[Neighbour],
) -> None:
    one, _ = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 40)
    record = chain.builder.draft(chain.genesis, [], proposer=PEOPLE[3].peer_id)
    bogus = sign(
        type(record)(
            **{f: getattr(record, f) for f in record.__struct_fields__}
            | {"parent": hash_of("never was"), "round_index": 30}
        )
    )

    async def body() -> None:
        await one.member.keep([*chain.all(), bogus])
        known = one.member.machine.known
        assert known.waiting
        one.member.machine.final_id = next(i for i, f in known.facts.items() if f.height == 38)
        heights = [one.pages.first_height() for _ in range(40)]
        assert 0 in heights
        assert heights.count(0) <= len(heights) / 2
        assert one.pages._step_back_heights < 200

    run(body)


def test_a_record_being_written_is_not_offered_yet(neighbours: list[Neighbour]) -> None:
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 1)
    signed = chain.all()[0]
    may_write = threading.Event()
    append = other.member.log.append

    def slow_append(record_id: str, envelope: bytes, **more: object) -> None:
        assert may_write.wait(10)
        append(record_id, envelope, **more)  # type: ignore[arg-type]

    other.member.log.append = slow_append  # type: ignore[method-assign]

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        was_new: list[bool] = []

        async def keep() -> None:
            was_new.append(await other.member.book.keep(signed, is_own=False))

        nursery.start_soon(keep)
        await until(lambda: other.member.book._being_kept)
        await one.exchange._sync_with(other.peer_id)
        assert not one.member.ids()
        assert not await other.member.book.keep(signed, is_own=False), "once is enough"
        may_write.set()
        await until(lambda: was_new)
        assert was_new == [True]
        await one.exchange._sync_with(other.peer_id)
        assert one.member.ids() == {signed.record_id}

    run_virtual(in_nursery(main))


def test_what_the_disk_does_not_take_may_be_kept_later(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 1)
    signed = chain.all()[0]
    append = one.member.log.append

    def full(record_id: str, envelope: bytes, **more: object) -> None:
        raise StorageFullError

    async def body() -> None:
        one.member.log.append = full  # type: ignore[method-assign]
        with pytest.raises(StorageFullError):
            await one.member.book.keep(signed, is_own=False)
        assert not one.member.ids()
        one.member.log.append = append  # type: ignore[method-assign]
        assert await one.member.book.keep(signed, is_own=False)

    run(body)


def test_a_full_disk_does_not_fetch_one_page_for_ever(
    neighbours: list[Neighbour], network: FakeNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_pages_module, "PAGE_BYTES", 1000)
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 10)
    one.is_full = True

    async def body() -> None:
        await other.member.keep(chain.all())
        await one.exchange._sync_with(other.peer_id)
        assert network.num_requests < 40

    run(body)


def test_a_neighbour_that_repeats_itself_is_left(
    neighbours: list[Neighbour], network: FakeNetwork
) -> None:
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 1)
    page = tuple(r.envelope for r in chain.all())

    async def again(peer_id: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return encode(SyncReply(envelopes=page, has_more=True))

    async def body() -> None:
        other.swarm.serve(SYNC_PROTOCOL, again, max_request_bytes=1, purpose="sync")
        await one.exchange._sync_with(other.peer_id)
        assert network.num_requests <= 3

    run(body)


# ---------------------------------------------------------------------------- hostile pages


def replies(neighbour: Neighbour, reply: bytes) -> None:
    async def respond(peer_id: str, data: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        return reply

    neighbour.swarm.serve(SYNC_PROTOCOL, respond, max_request_bytes=1, purpose="sync")


def hostile_envelopes() -> dict[str, bytes]:
    record = Leaving(
        run_id=RUN_ID, module_id=MODULE, round_index=0, author=PEOPLE[0].peer_id, base=hash_of("b")
    )
    elsewhere = Leaving(
        run_id="cd" * 32,
        module_id=MODULE,
        round_index=0,
        author=PEOPLE[0].peer_id,
        base=hash_of("b"),
    )
    return {
        "wrong run": sign(elsewhere).envelope,
        "bad signature": sign(record, by=PEOPLE[1]).envelope,
        "garbage": b"\x00\x01\x02",
        "empty": b"",
        "huge": b"\x00" * 70_000,
    }


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
    one.member.book._height_of.update({hash_of(str(i)): i for i in range(MAX_HAVE + 50)})
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


# ---------------------------------------------------------------------------------- gossip


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


def test_sign_is_what_verify_accepts(neighbours: list[Neighbour]) -> None:
    one, _ = neighbours
    record = Leaving(
        run_id=RUN_ID, module_id=MODULE, round_index=0, author=one.peer_id, base=hash_of("b")
    )
    signed = one.member.book.sign(record)
    assert one.member.book.verify(signed.envelope) == signed == sign(record)
    assert identity(1).peer_id == one.peer_id
