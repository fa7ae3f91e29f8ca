"""Anti-entropy: two books exchange until they are equal."""

from __future__ import annotations

import threading

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.fakes.members import (
    PEOPLE,
    Member,
    SignedChain,
    hash_of,
    sign,
)
from tests.fakes.neighbours import Neighbour, run
from tests.fakes.network import FakeNetwork
from tests.fakes.virtual_time import in_nursery, run_virtual, until
from volunteer.agent import sync_pages as sync_pages_module
from volunteer.agent.exchange import SYNC_PROTOCOL
from volunteer.agent.peer_memory import PeerMemory
from volunteer.agent.sync_pages import OVERLAP_HEIGHTS, SyncPages
from volunteer.agent.wire import (
    SyncReply,
    encode,
)
from volunteer.errors import StorageFullError
from volunteer.rounds import loose_records
from volunteer.rounds.records import Commit


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
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    data: st.DataObject,
) -> None:
    monkeypatch.setattr(loose_records, "MAX_PER_OUTSIDER_AND_BASE", 100)  # three people sign it all
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
        answer = await other.pages.answer(one.peer_id, one.pages.request(0))
        assert answer.reply.has_more
        assert len(reads) == len(answer.reply.envelopes) + 1

    run(body)


def test_pages_are_by_height_and_within_their_size(neighbours: list[Neighbour]) -> None:
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 12)

    async def body() -> None:
        await other.member.keep(reversed(chain.all()))
        pages = SyncPages(other.member.machine, other.member.book)
        answer = await other.pages.answer(one.peer_id, pages.request(10**6))
        assert not answer.reply.envelopes
        answer = await other.pages.answer(one.peer_id, one.pages.request(0))
        records = [other.member.book.verify(e).record for e in answer.reply.envelopes]
        heights = [r.round_index for r in records if isinstance(r, Commit)]
        assert heights == sorted(heights)
        assert len(records) == len(other.member.ids())
        assert not answer.reply.has_more
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
