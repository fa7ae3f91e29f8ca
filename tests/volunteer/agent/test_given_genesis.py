"""A run that begins from weights: who has them serves them, who lacks them fetches them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.fakes.members import PEOPLE
from tests.fakes.network import FakeNetwork
from tests.fakes.solo import GENESIS_STATE, Disk, Solo, solo_spec
from tests.fakes.virtual_time import in_nursery, run_virtual
from volunteer.messages import BuildGenesis, VerifyState

pytestmark = pytest.mark.usefixtures("virtual_now")
SPEC = solo_spec(is_given=True)
GENESIS = SPEC.genesis.state_hash
Body = Callable[[Solo, Solo], Awaitable[None]]


def run_two(folder: Path, body: Body) -> None:
    """Run a publisher, who has imported the weights, and a newcomer."""

    @in_nursery
    async def main(nursery: trio.Nursery, _clock: MockClock) -> None:
        network = FakeNetwork()
        disks = [Disk(folder / name, PEOPLE[i]) for i, name in enumerate(("publisher", "newcomer"))]
        disks[0].store.add_bytes(GENESIS_STATE)
        solos = [Solo(disk, nursery, network, SPEC) for disk in disks]
        try:
            await body(*solos)
        finally:
            for solo in solos:
                solo.close()

    run_virtual(main, jumps=True)


async def start(solo: Solo) -> None:
    await solo.start()
    solo._nursery.start_soon(solo.exchange.run, 0.5, lambda: None)


def test_a_newcomer_fetches_the_weights_and_both_train_on(tmp_path: Path) -> None:
    async def body(publisher: Solo, newcomer: Solo) -> None:
        for solo in (newcomer, publisher):
            await start(solo)
        await publisher.until(lambda: min(publisher.height, newcomer.height) >= 3)
        await publisher.until(lambda: publisher.machine.tip == newcomer.machine.tip)
        assert newcomer.disk.store.verify(GENESIS)
        for solo in (publisher, newcomer):
            asked = solo.aggregator.asked
            assert not any(isinstance(command, BuildGenesis) for command in asked)
            assert VerifyState(request_id=1, state_hash=GENESIS) in asked
        assert newcomer.trainer.rebases[0].state_hash == GENESIS

    run_two(tmp_path, body)


def test_a_member_without_the_weights_waits_for_who_has_them(tmp_path: Path) -> None:
    async def body(publisher: Solo, newcomer: Solo) -> None:
        await start(newcomer)
        publisher.disk.store.delete(GENESIS)
        await trio.sleep(300.0)  # noqa: TID251 - virtual time
        assert newcomer.height == -1
        assert newcomer.trainer.rebases == []
        publisher.disk.store.add_bytes(GENESIS_STATE)
        await newcomer.until(lambda: newcomer.height == 0)

    run_two(tmp_path, body)


@pytest.mark.slow
def test_who_comes_when_the_weights_are_pruned_begins_later(tmp_path: Path) -> None:
    async def body(publisher: Solo, newcomer: Solo) -> None:
        await start(publisher)
        store = publisher.disk.store

        def prune() -> None:
            for blob_id in store.list_ids():
                os.utime(store.file_of(blob_id), (1.0, 1.0))
            publisher.files.prune(publisher.machine)

        await publisher.until(lambda: publisher.height == SPEC.rounds.journal_rounds)
        prune()
        await trio.sleep(0.5)  # noqa: TID251 - virtual time
        assert store.has(GENESIS), "the run is young: others may need it"
        await publisher.until(lambda: publisher.height == SPEC.rounds.journal_rounds + 4)
        prune()
        await publisher.until(lambda: not store.has(GENESIS))
        await start(newcomer)
        await newcomer.until(lambda: newcomer.height >= SPEC.rounds.journal_rounds + 4)
        assert not newcomer.disk.store.has(GENESIS)
        assert newcomer.trainer.rebases[0].round_index > SPEC.rounds.journal_rounds

    run_two(tmp_path, body)


def test_weights_that_are_no_state_of_the_run_are_told(tmp_path: Path) -> None:
    async def body(publisher: Solo, newcomer: Solo) -> None:
        newcomer.aggregator.refusal = "it has outer momentum"
        await start(newcomer)
        await newcomer.until(lambda: newcomer.files.genesis_problem)
        assert "outer momentum" in newcomer.files.genesis_problem
        assert newcomer.height == -1
        newcomer.aggregator.refusal = ""
        await newcomer.until(lambda: newcomer.height == 0)
        assert newcomer.files.genesis_problem == ""

    run_two(tmp_path, body)
