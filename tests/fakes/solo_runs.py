"""Runs of `Solo` in virtual time, and what must hold of all that they signed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio
from trio.testing import MockClock

from tests.fakes.members import PEOPLE
from tests.fakes.solo import TOKENS, Disk, Solo, applied
from tests.fakes.virtual_time import in_nursery, run_virtual
from volunteer.agent.record_book import SignedRecord
from volunteer.rounds.chain import rank_of
from volunteer.rounds.records import Commit, Contribution

Body = Callable[[Solo], Awaitable[None]]


def run_solo(disk: Disk, body: Body, *, is_contributing: bool = True) -> None:
    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        solo = Solo(disk, nursery)
        try:
            await solo.start(is_contributing=is_contributing)
            await body(solo)
            assert not solo.sent_before_kept
        finally:
            solo.close()

    run_virtual(in_nursery(main), jumps=True)


def verify_never_twice(records: list[SignedRecord] | list[object]) -> None:
    """I1: one vote a height, one contribution and one proposal a commit."""
    votes: dict[int, set[str]] = {}
    bases: dict[str, set[str]] = {}
    parents: dict[str, set[str]] = {}
    for record in records:
        if isinstance(record, Contribution):
            bases.setdefault(record.base, set()).add(record.blob_id)
            if record.vote:
                votes.setdefault(record.round_index, set()).add(record.base)
        if isinstance(record, Commit):
            parents.setdefault(record.parent, set()).add(record.state_hash)
    assert all(len(blobs) == 1 for blobs in bases.values())
    assert all(len(voted) == 1 for voted in votes.values())
    assert all(len(states) == 1 for states in parents.values())


def foreign(solo: Solo, state_hash: str) -> list[SignedRecord]:
    """Return another member's first contribution and the commit that lists it."""
    who = PEOPLE[1]
    blob_id = solo.disk.store.add_bytes(b"foreign work")
    genesis = solo.machine.rules.genesis_id
    contribution = Contribution(
        run_id=solo.spec.run_id,
        module_id="dense",
        round_index=0,
        author=who.peer_id,
        base=genesis,
        vote=True,
        blob_id=blob_id,
        blob_bytes=12,
        codec="int4",
        codec_version=1,
        tokens=TOKENS,
    )
    signed = solo.sign(contribution, who)
    genesis_state = solo.files.state_hash_of(solo.machine, genesis)
    right = solo.disk.store.add_bytes(applied(genesis_state, [blob_id]))
    commit = Commit(
        run_id=solo.spec.run_id,
        module_id="dense",
        round_index=1,
        parent=genesis,
        rank=rank_of(solo.machine.rules, solo.machine.known.facts[genesis], who.peer_id),
        proposer=who.peer_id,
        contributions=(signed.record_id,),
        state_hash=state_hash or right,
    )
    return [signed, solo.sign(commit, who)]
