"""A newcomer far behind: what its trainer waits for, and what a kill leaves of a state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from p2p.blobstore import CHUNK_BYTES
from p2p.flow import Priority
from tests.fakes.members import PEOPLE
from tests.fakes.network import FakeNetwork
from tests.fakes.solo import ROUND_S, Disk, Solo
from tests.fakes.solo_runs import run_solo
from tests.fakes.virtual_time import in_nursery, run_virtual
from volunteer.agent.record_book import SignedRecord, verify_envelope
from volunteer.rounds import events as ev
from volunteer.rounds.records import DENSE_MODULE

pytestmark = pytest.mark.usefixtures("virtual_now")
HEIGHT = 12
"""Above the journal: the blobs from the genesis on are gone."""


def make_chain(disk: Disk) -> list[SignedRecord]:
    """Have one member make rounds alone; return its records."""
    kept: list[SignedRecord] = []

    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == HEIGHT)
        kept.extend(
            verify_envelope(data, solo.spec.run_id, DENSE_MODULE) for data in solo.record_log.all()
        )

    run_solo(disk, body)
    return kept


class Newcomer:
    """A second member, to whom states come when the test says so."""

    def __init__(self, folder: Path, nursery: trio.Nursery, donor: Disk | None) -> None:
        network = FakeNetwork()
        if donor is not None:
            network.join(donor.who.peer_id).store = donor.store
        self.disk = Disk(folder, who=PEOPLE[1])
        self.solo = Solo(self.disk, nursery, network)
        self.may_come = trio.Event()
        self.is_asked = trio.Event()
        self._fetch_blob = self.solo.swarm.fetch_blob
        self.solo.swarm.fetch_blob = self._fetch_late  # type: ignore[method-assign]

    async def _fetch_late(self, blob_id: str, **how: Any) -> None:
        if how["priority"] is Priority.BULK and how["purpose"] == "states":
            self.is_asked.set()
            await self.may_come.wait()
        await self._fetch_blob(blob_id, **how)

    async def start(self, records: list[SignedRecord]) -> None:
        for signed in records:
            await self.solo.driver.take_record(signed)
        await self.solo.start()


def test_a_fresh_trainer_waits_for_the_state_that_is_on_its_way(tmp_path: Path) -> None:
    donor = Disk(tmp_path / "donor")
    records = make_chain(donor)

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        one = Newcomer(tmp_path / "newcomer", nursery, donor)
        await one.start(records)
        await one.is_asked.wait()
        await trio.sleep(3 * ROUND_S)  # noqa: TID251 - virtual time
        assert one.solo.trainer.rebases == []
        progress = one.solo.driver.state_progress
        assert progress is not None
        assert progress.round_index in (HEIGHT - 1, HEIGHT - 2)
        one.may_come.set()
        await one.solo.until(lambda: one.solo.height == HEIGHT)
        await one.solo.until(lambda: one.solo.trainer.rebases)
        assert one.solo.trainer.rebases[0].round_index >= HEIGHT - 2
        assert one.solo.driver.state_progress is None
        one.solo.close()

    run_virtual(main, jumps=True)


def test_it_waits_no_longer_for_a_state_that_cannot_be_had(tmp_path: Path) -> None:
    records = make_chain(Disk(tmp_path / "donor"))

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        one = Newcomer(tmp_path / "newcomer", nursery, None)
        one.may_come.set()
        await one.start(records)
        await one.solo.until(lambda: one.solo.trainer.rebases)
        assert one.solo.trainer.rebases[0].round_index == 0
        one.solo.close()

    run_virtual(main, jumps=True)


def test_what_has_come_of_a_state_is_kept_however_old_and_counted_at_the_next_start(
    tmp_path: Path,
) -> None:
    donor = Disk(tmp_path / "donor")
    records = make_chain(donor)

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        one = Newcomer(tmp_path / "newcomer", nursery, donor)
        await one.start(records)
        await one.is_asked.wait()
        machine, store = one.solo.machine, one.disk.store
        newest = next(c for c, facts in machine.known.facts.items() if facts.height == HEIGHT - 1)
        chunk = os.urandom(CHUNK_BYTES)
        state_hash = machine.state_hash_of(newest)
        for name in (state_hash, "ab" * 32):
            (store.directory / f"{name}.partial").write_bytes(chunk)
            os.utime(store.directory / f"{name}.partial", (1.0, 1.0))
        one.solo.files.prune(machine)
        await one.solo.until(lambda: ("ab" * 32) not in store.partial_bytes())
        assert store.partial_bytes() == {state_hash: CHUNK_BYTES}
        told = one.solo.files.state_events(machine, [])
        assert told == [ev.StatePartHeld(newest, CHUNK_BYTES)]
        one.solo.close()

    run_virtual(main, jumps=True)


def test_a_state_that_the_disk_has_damaged_is_fetched_again(tmp_path: Path) -> None:
    donor = Disk(tmp_path / "donor")
    records = make_chain(donor)

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        one = Newcomer(tmp_path / "newcomer", nursery, donor)
        num_fetched = 0
        fetch = one._fetch_blob

        async def fetch_and_damage(blob_id: str, **how: Any) -> None:
            nonlocal num_fetched
            await fetch(blob_id, **how)
            if how["purpose"] == "states":
                num_fetched += 1
                if num_fetched == 1:
                    one.disk.store.file_of(blob_id).write_bytes(b"bits have flipped")
                    one.solo.aggregator.refusal = "it is damaged on the disk"
                else:
                    one.solo.aggregator.refusal = ""

        one._fetch_blob = fetch_and_damage
        one.may_come.set()
        await one.start(records)
        await one.solo.until(lambda: one.solo.height == HEIGHT)
        assert num_fetched == 2
        one.solo.close()

    run_virtual(main, jumps=True)
