"""What was signed is remembered beside the key, before it is sent, and missed when it is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.fakes.members import PEOPLE, Member, SignedChain, sign
from volunteer.agent import signed_mark
from volunteer.agent.record_book import SignedRecord
from volunteer.agent.signed_mark import SignedMark
from volunteer.errors import StorageFullError

ME = PEOPLE[0]


def make(folder: Path, peer_id: str = ME.peer_id) -> SignedMark:
    return SignedMark(folder / "signed", peer_id, "ab" * 32, "dense")


def own_records(num_rounds: int) -> list[SignedRecord]:
    chain = SignedChain()
    tip = chain.genesis
    made = []
    for _ in range(num_rounds):
        made.append(sign(chain.builder.records[chain.builder.contribution(ME.peer_id, tip)]))
        tip = chain.grow(tip, 1, PEOPLE[1:3])
    return made


def test_a_key_that_has_signed_nothing_has_lost_nothing(tmp_path: Path) -> None:
    mark = make(tmp_path)
    assert not mark.has_lost(None)
    assert not mark.has_lost(7)
    assert not mark.file.exists()


def test_what_is_missing_of_what_was_signed_is_a_loss(tmp_path: Path) -> None:
    make(tmp_path).note(0)
    assert make(tmp_path).has_lost(None)
    make(tmp_path).note(5)
    mark = make(tmp_path)
    assert mark.has_lost(None), "the folder was deleted"
    assert mark.has_lost(4), "an old copy of it was put back"
    assert not mark.has_lost(5)
    mark.note(3)
    assert make(tmp_path).has_lost(4), "it never goes back"
    assert not make(tmp_path, PEOPLE[1].peer_id).has_lost(None), "another key has signed nothing"


def test_a_mark_that_cannot_be_read_counts_as_a_loss(tmp_path: Path) -> None:
    mark = make(tmp_path)
    mark.note(2)
    mark.file.write_text('{"height": "all"}')
    mark = make(tmp_path)
    assert mark.has_lost(10**6)
    mark.note(7)  # it has listened, and signs again
    assert not make(tmp_path).has_lost(7), "the next start knows"
    assert make(tmp_path).has_lost(6)


def test_the_book_marks_what_it_signs_and_only_that(tmp_path: Path) -> None:
    member = Member(tmp_path, ME)
    mark = member.book._mark
    first, second, third = own_records(3)

    async def body() -> None:
        await member.book.keep(first, is_own=False)  # it came back from another
        assert not mark.file.exists()
        await member.book.keep(second, is_own=True)
        await member.book.keep(third, is_own=True)

    trio.run(body)
    assert member.log.highest_own() == 2
    again = SignedMark(mark.file.parent, ME.peer_id, "", "")
    again.file = mark.file
    assert again._read() == 2
    member.log.close()


def test_a_kill_before_the_mark_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record was not sent yet: an agent that were silent for it would be so without need."""

    class KilledError(BaseException):
        pass

    def kill(file: Path, data: bytes) -> None:
        raise KilledError

    member = Member(tmp_path, ME)
    (record,) = own_records(1)

    async def body() -> None:
        await member.book.keep(record, is_own=True)

    with monkeypatch.context() as patch:
        patch.setattr(signed_mark, "replace_file", kill)
        with pytest.raises(KilledError):
            trio.run(body)
    member.log.close()
    again = Member(tmp_path, ME)
    assert again.log.highest_own() == 0
    assert not again.book._mark.has_lost(again.log.highest_own())
    again.log.close()


def test_without_room_for_the_mark_nothing_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member(tmp_path, ME)
    (record,) = own_records(1)

    def disk_is_full(file: Path, data: bytes) -> None:
        raise StorageFullError

    async def body() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(signed_mark, "replace_file", disk_is_full)
            with pytest.raises(StorageFullError):
                await member.book.keep(record, is_own=True)
        assert not member.book.has(record.record_id), "it is tried again"
        assert await member.book.keep(record, is_own=True)
        assert member.book._mark.has_lost(None)

    trio.run(body)
    assert member.log.highest_own() == 0
    member.log.close()
