"""The book writes what there is room for, forgets what there is none for, and serves at a rate."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio

from p2p.identity import Identity
from tests.fakes.members import PEOPLE, Member, SignedChain, sign
from tests.fakes.neighbours import Neighbour, run
from volunteer.agent import sync_pages as sync_pages_module
from volunteer.agent.height_index import HeightIndex
from volunteer.agent.record_book import SignedRecord
from volunteer.agent.sync_pages import SyncPages
from volunteer.agent.wire import PushRecords, RecordsRequest, encode
from volunteer.rounds import loose_records
from volunteer.rounds.records import Contribution


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seats for newcomers on a base, eight in all."""
    monkeypatch.setattr(loose_records, "OUTSIDERS_PER_BASE_FACTOR", 2 / 32)
    monkeypatch.setattr(loose_records, "MAX_NEWCOMER_RECORDS", 8)
    monkeypatch.setattr(loose_records, "MAX_ORPHANS", 8)


def spam(chain: SignedChain, tip: str, count: int) -> list[SignedRecord]:
    """Return contributions that newcomers have signed, one each."""
    made = []
    facts = chain.builder.facts(tip)
    for number in range(count):
        who = Identity((1000 + number).to_bytes(32))
        record = Contribution(
            run_id=chain.builder.rules.run_id,
            module_id="dense",
            round_index=facts.height,
            author=who.peer_id,
            base=tip,
            vote=False,
            blob_id="b" * 64,
            blob_bytes=100,
            codec="int4",
            codec_version=1,
            tokens=1,
        )
        made.append(sign(record, who))
    return made


async def on_disk(member: Member) -> set[str]:
    envelopes = await trio.to_thread.run_sync(lambda: list(member.log.all()))
    return {member.book.verify(envelope).record_id for envelope in envelopes}


def test_what_there_is_no_room_for_is_not_on_the_disk_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = SignedChain()
    tip = chain.grow(chain.genesis, 4)
    member = Member(tmp_path, PEOPLE[3])

    async def body() -> None:
        await member.keep(chain.all())
        with caplog.at_level(logging.WARNING):
            await member.keep(spam(chain, tip, 60))
        assert len(member.book) == len(chain.all()) + 2
        # One more may lie there until the next write: it was forgotten after its own.
        assert len(await on_disk(member)) <= len(member.book) + 1
        assert {r.record_id for r in chain.all()} <= await on_disk(member)
        lines = [r.getMessage() for r in caplog.records]
        assert 1 <= len(lines) <= 2
        assert all("turned away: too many unlisted records of newcomers" in x for x in lines)

    trio.run(body)
    member.log.close()
    again = Member(tmp_path, PEOPLE[3])
    for signed in again.book.load():
        again.machine.known.add(signed.record_id, signed.record)
    known = member.machine.known
    assert again.machine.known.facts == known.facts
    # Which newcomers have a seat is drawn anew, among those and the one that was still there.
    on_chain = {r.record_id for r in chain.all()} & known.contributions.keys()
    assert on_chain <= again.machine.known.contributions.keys()
    assert len(again.machine.known.contributions) == len(known.contributions)
    again.log.close()


def test_a_forgotten_record_may_come_again_when_it_is_needed(tmp_path: Path) -> None:
    chain = SignedChain()
    tip = chain.grow(chain.genesis, 3)
    member = Member(tmp_path, PEOPLE[3])
    crowd = spam(chain, tip, 20)

    async def body() -> None:
        await member.keep(chain.all())
        await member.keep(crowd)
        gone = next(r for r in crowd if not member.book.has(r.record_id))
        assert member.book.was_turned_away(gone.record_id)
        chain.builder.add(gone.record)
        commit = chain.builder.records[chain.builder.commit(tip, [gone.record_id])]
        await member.keep([sign(commit)])
        assert member.machine.known.missing_records() == [gone.record_id]
        await member.keep([gone])
        assert member.book.has(gone.record_id)
        assert gone.record_id in await on_disk(member)
        assert member.machine.known.facts.keys() == chain.builder.known.facts.keys()

    trio.run(body)
    member.log.close()


def test_a_newcomer_gets_the_chain_before_all_that_strangers_have_sent(
    neighbours: list[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_pages_module, "PAGE_BYTES", 4000)
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 12)
    crowd = [r for height in range(13) for r in spam(chain, chain_at(chain, height), 2)]

    async def body() -> None:
        await other.member.keep(chain.all())
        await other.member.keep(crowd)
        await one.exchange._sync_with(other.peer_id)
        assert one.member.machine.known.facts.keys() == chain.builder.known.facts.keys()
        assert not one.member.machine.known.waiting

    run(body)


def chain_at(chain: SignedChain, height: int) -> str:
    return next(i for i, f in chain.builder.known.facts.items() if f.height == height)


def test_what_was_turned_away_is_neither_sent_nor_wanted_again(neighbours: list[Neighbour]) -> None:
    one, other = neighbours
    chain = SignedChain()
    tip = chain.grow(chain.genesis, 3)
    crowd = spam(chain, tip, 30)

    async def body() -> None:
        for neighbour in neighbours:
            await neighbour.member.keep(chain.all())
        await one.member.keep(crowd[:15])
        await other.member.keep(crowd[15:])
        for _ in range(3):
            await one.exchange._sync_with(other.peer_id)
        answer = await other.pages.answer(one.peer_id, one.pages.request(0))
        assert not answer.reply.envelopes
        assert not await one.pages.pushes(answer.reply.want), "what one has not kept it cannot give"
        for neighbour in neighbours:
            assert len(neighbour.member.book) == len(chain.all()) + 2

    run(body)


# --------------------------------------------------------------------------------- rate


def test_records_are_served_at_a_rate_and_not_refused(
    neighbours: list[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_pages_module, "PEER_BURST_BYTES", 64 * 1024)
    monkeypatch.setattr(sync_pages_module, "PEER_BYTES_PER_S", 16 * 1024)
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 12)
    now = [0.0]
    pages = SyncPages(other.member.machine, other.member.book, lambda: now[0])
    ids = tuple(bytes.fromhex(r.record_id) for r in chain.all())
    rules = chain.builder.rules
    wanted = encode(RecordsRequest(run_id=rules.run_id, module_id="dense", ids=ids))
    push = encode(
        PushRecords(
            run_id=rules.run_id,
            module_id="dense",
            envelopes=tuple(r.envelope for r in chain.all()),
        )
    )

    async def body() -> None:
        await other.member.keep(chain.all())
        got = [await pages.answer("greedy", one.pages.request(0)) for _ in range(6)]
        assert got[0].reply.envelopes
        assert not got[-1].reply.envelopes
        assert got[-1].reply.has_more, "there is more, later"
        assert got[-1].reply.tip is not None
        assert not (await pages.answer("greedy", wanted)).reply.envelopes
        assert not (await pages.answer("greedy", push)).pushed
        assert (await pages.answer("patient", wanted)).reply.envelopes, "others are served"
        now[0] += 10.0
        assert (await pages.answer("greedy", wanted)).reply.envelopes
        now[0] += 10.0
        assert (await pages.answer("greedy", push)).pushed

    run(body)


def test_all_neighbours_together_have_a_rate(
    neighbours: list[Neighbour], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_pages_module, "ALL_BURST_BYTES", 100 * 1024)
    one, other = neighbours
    chain = SignedChain()
    chain.grow(chain.genesis, 2)
    pages = SyncPages(other.member.machine, other.member.book, lambda: 0.0)

    async def body() -> None:
        await other.member.keep(chain.all())
        answers = [await pages.answer(f"peer-{i}", one.pages.request(0)) for i in range(12)]
        served = [bool(a.reply.envelopes) for a in answers]
        assert served == sorted(served, reverse=True)
        assert 3 <= sum(served) <= 6, "16 KiB and a page each, of 100 KiB"

    run(body)


def test_the_index_finds_by_height_and_forgets() -> None:
    index = HeightIndex()
    for record_id, height in (("a", 3), ("b", 1), ("c", 3), ("d", 7), ("a", 9)):
        index.add(record_id, height)
    assert list(index.rising(2)) == ["a", "c", "d"]
    assert list(index.falling(0)) == ["d", "a", "c", "b"]
    for record_id in ("c", "d", "never"):
        index.discard(record_id)
    assert list(index.rising(0)) == ["b", "a"]
    assert (len(index), "a" in index, "c" in index, index["a"]) == (2, True, False, 3)
