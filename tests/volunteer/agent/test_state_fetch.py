"""The fetch of a state stops with a pause, goes on after it, and says truthfully how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from p2p.blobstore import BlobStore, blob_id_of_bytes
from p2p.errors import BlobUnavailableError
from p2p.flow import Priority
from p2p.swarm import Swarm
from p2p.swarm_types import DownloadView
from tests.fakes.members import rules
from tests.fakes.virtual_time import in_nursery, run_virtual, settle
from tests.volunteer.rounds.chain_builder import ChainBuilder
from tests.volunteer.rounds.desk import Desk
from volunteer.agent.aggregator_service import AggregatorRefusedError, AggregatorService
from volunteer.agent.priority import priority_of
from volunteer.agent.state_fetch import StateFetch, StateProgress
from volunteer.messages import AggregatorCommand, AggregatorEvent, StateVerified, VerifyState
from volunteer.rounds.machine import Machine
from volunteer.rounds.turn import Timing

STATE = b"weights and momentum"
STATE_HASH = blob_id_of_bytes(STATE)


@dataclass
class SlowSwarm:
    """Gives a blob when the test says so."""

    store: BlobStore
    asked: list[dict[str, Any]] = field(default_factory=list)
    num_cancelled: int = 0
    may_come: trio.Event = field(default_factory=trio.Event)
    is_gone: bool = False
    views: list[DownloadView] = field(default_factory=list)

    async def fetch_blob(self, blob_id: str, **how: Any) -> None:
        self.asked.append(how)
        try:
            await self.may_come.wait()
        except trio.Cancelled:
            self.num_cancelled += 1
            raise
        if self.is_gone:
            raise BlobUnavailableError("nobody has it")
        self.store.add_bytes(STATE)

    def downloads(self) -> tuple[DownloadView, ...]:
        return tuple(self.views)


@dataclass
class Judge:
    """Stands for the aggregator."""

    refusal: str = ""
    asked: list[AggregatorCommand] = field(default_factory=list)

    async def ask(self, make: Callable[[int], AggregatorCommand]) -> AggregatorEvent:
        await trio.lowlevel.checkpoint()
        self.asked.append(make(1))
        if self.refusal:
            raise AggregatorRefusedError(self.refusal)
        return StateVerified(request_id=1, state_hash=STATE_HASH)


@dataclass
class Scene:
    swarm: SlowSwarm
    judge: Judge
    fetch: StateFetch
    ended: list[BaseException | None] = field(default_factory=list)

    async def run(self) -> None:
        try:
            await self.fetch.fetch(STATE_HASH, 7, _nobody)
        except (BlobUnavailableError, AggregatorRefusedError) as error:
            self.ended.append(error)
        else:
            self.ended.append(None)

    def progress(self) -> StateProgress:
        told = self.fetch.progress()
        assert told is not None
        return told


def _nobody() -> Sequence[str]:
    return ()


def make_scene(folder: Path) -> Scene:
    store = BlobStore(folder)
    swarm, judge = SlowSwarm(store), Judge()
    fetch = StateFetch(
        store, cast("Swarm", swarm), cast("AggregatorService", judge), state_bytes=len(STATE)
    )
    return Scene(swarm, judge, fetch)


def test_it_comes_in_bulk_and_is_looked_through(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        assert scene.fetch.progress() is None
        nursery.start_soon(scene.run)
        await settle()
        assert scene.progress().held_bytes == 0
        scene.swarm.may_come.set()
        await settle()
        assert scene.ended == [None]
        assert scene.fetch.progress() is None

    run_virtual(main)
    (how,) = scene.swarm.asked
    assert how["priority"] is Priority.BULK
    assert how["max_bytes"] == len(STATE)
    assert scene.judge.asked == [VerifyState(request_id=1, state_hash=STATE_HASH)]


def test_a_pause_stops_it_and_a_resume_goes_on(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        nursery.start_soon(scene.run)
        await settle()
        scene.fetch.set_allowed(False)
        await settle()
        assert (len(scene.swarm.asked), scene.swarm.num_cancelled) == (1, 1)
        assert scene.progress().num_peers == 0, "it is still wanted"
        scene.fetch.set_allowed(False)
        scene.fetch.set_allowed(True)
        await settle()
        assert len(scene.swarm.asked) == 2
        scene.swarm.may_come.set()
        await settle()
        assert scene.ended == [None]

    run_virtual(main)


def test_what_begins_in_a_pause_waits_for_its_end(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        scene.fetch.set_allowed(False)
        nursery.start_soon(scene.run)
        await settle()
        assert not scene.swarm.asked
        scene.fetch.set_allowed(True)
        await settle()
        assert len(scene.swarm.asked) == 1

    run_virtual(main)


@pytest.mark.parametrize("is_gone", [True, False])
def test_what_cannot_be_had_or_is_no_state_ends_it(tmp_path: Path, is_gone: bool) -> None:
    scene = make_scene(tmp_path)
    scene.swarm.is_gone = is_gone
    scene.judge.refusal = "another shape"

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        scene.swarm.may_come.set()
        nursery.start_soon(scene.run)
        await settle()
        assert scene.fetch.progress() is None

    run_virtual(main)
    kind = BlobUnavailableError if is_gone else AggregatorRefusedError
    assert [type(error) for error in scene.ended] == [kind]


def test_progress_is_what_the_download_says_and_then_the_whole(tmp_path: Path) -> None:
    scene = make_scene(tmp_path)

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        nursery.start_soon(scene.run)
        await settle()
        scene.swarm.views = [
            DownloadView(
                blob_id=blob_id, size_bytes=20, held_bytes=held, bytes_per_s=5.0, num_peers=2
            )
            for blob_id, held in (("ab" * 32, 1), (STATE_HASH, 9))
        ]
        told = scene.progress()
        assert (told.held_bytes, told.total_bytes, told.num_peers) == (9, 20, 2)
        assert (told.round_index, told.bytes_per_s, told.is_complete) == (7, 5.0, False)
        scene.swarm.views.clear()
        scene.swarm.store.add_bytes(STATE)
        told = scene.progress()
        assert told.is_complete
        assert told.held_bytes == told.total_bytes

    run_virtual(main)


def test_the_round_that_is_on_goes_first() -> None:
    chain = ChainBuilder()
    commits = [chain.genesis, *chain.rounds(chain.genesis, "ab", 5)]
    desk = Desk(chain)
    desk.stand_on(commits[3])
    machine = desk.machine
    machine.tip = commits[3]

    def of_listed(height: int) -> set[Priority]:
        listed = chain.facts(commits[height]).listed
        return {priority_of(machine, chain.known.contributions[i].blob_id) for i in listed}

    assert of_listed(2) == {Priority.BULK}, "for those who replay"
    assert of_listed(3) == {Priority.URGENT}, "may still be listed late, and is just being applied"
    assert of_listed(4) == {Priority.URGENT}
    assert of_listed(5) == {Priority.URGENT}, "of a commit that the others stand on already"
    late = chain.contribution("c", commits[3])
    desk.learn()
    assert priority_of(machine, chain.known.contributions[late].blob_id) is Priority.URGENT
    assert priority_of(machine, chain.known.commits[commits[3]].state_hash) is Priority.BULK
    nowhere = Machine(rules(), Timing(round_s=8, grace_s=1, failover_s=2), "me")
    assert priority_of(nowhere, "ab" * 32) is Priority.BULK
