"""The driver among others: their commits, lies and blobs, and a swarm that agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.fakes.members import PEOPLE, hash_of
from tests.fakes.network import FakeNetwork
from tests.fakes.solo import TOKENS, Disk, Solo
from tests.fakes.solo_runs import foreign, run_solo, verify_never_twice
from tests.fakes.virtual_time import in_nursery, run_virtual
from volunteer.rounds import events as ev
from volunteer.rounds.records import Contribution

pytestmark = pytest.mark.usefixtures("virtual_now")


def test_the_commit_of_another_is_applied(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        records = foreign(solo, "")
        for signed in records:
            await solo.driver.take_record(signed)
        await solo.until(lambda: solo.machine.tip == records[1].record_id)
        assert ("verified", records[1].record_id) in solo.record_log.notes()

    run_solo(Disk(tmp_path / "a"), body)


def test_a_wrong_state_hash_is_refused(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        records = foreign(solo, hash_of("a lie"))
        for signed in records:
            await solo.driver.take_record(signed)
        await solo.until(lambda: records[1].record_id in solo.machine.known.refused)
        await solo.until(lambda: solo.height == 2)
        assert records[1].record_id not in solo.machine.known.chain_down(solo.machine.tip or "")
        assert ("verified", records[1].record_id) not in solo.record_log.notes()

    run_solo(Disk(tmp_path / "a"), body)


def test_a_commit_that_marks_other_work_than_its_list_gives_is_refused(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        records = foreign(solo, "")
        contribution_id, commit_id = (signed.record_id for signed in records)
        solo.aggregator.marked.add(contribution_id)
        for signed in records:
            await solo.driver.take_record(signed)
        await solo.until(lambda: commit_id in solo.machine.known.refused)
        assert "marks 0 contributions" in solo.machine.known.refused[commit_id]
        assert ("verified", commit_id) not in solo.record_log.notes()

    run_solo(Disk(tmp_path / "a"), body)


def test_a_bad_blob_is_refused_and_its_author_left_out(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        signed = foreign(solo, "")[0]
        assert isinstance(signed.record, Contribution)
        solo.aggregator.bad_blobs[signed.record.blob_id] = "not finite"
        await solo.driver.take_record(signed)
        await solo.until(lambda: solo.height == 1)
        assert solo.machine.known.bad == {signed.record_id: "not finite"}
        tip = solo.machine.tip or ""
        assert signed.record_id not in solo.machine.known.facts[tip].listed

    run_solo(Disk(tmp_path / "a"), body)


def test_a_lost_aggregator_is_asked_again(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 1)
        solo.aggregator.is_lost = True
        await trio.sleep(30)  # noqa: TID251 - virtual time
        num_asked = len(solo.aggregator.asked)
        assert solo.height == 1
        assert num_asked < 40, "with pauses"
        solo.aggregator.is_lost = False
        await solo.until(lambda: solo.height == 2)

    run_solo(Disk(tmp_path / "a"), body)


def test_a_genesis_that_could_not_be_built_is_tried_again(tmp_path: Path) -> None:
    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        solo = Solo(Disk(tmp_path / "a"), nursery)
        solo.aggregator.refusal = "the disk is full"
        await solo.start()
        await trio.sleep(10)  # noqa: TID251 - virtual time
        assert solo.height == -1
        assert len(solo.aggregator.asked) == 1
        solo.aggregator.refusal = ""
        await solo.until(lambda: solo.height == 1)
        solo.close()

    run_virtual(in_nursery(main), jumps=True)


def test_a_trainer_that_ends_while_encoding_is_asked_again(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 1)
        solo.trainer.is_deaf = True
        await solo.until(lambda: solo.trainer.num_asked_to_contribute == 2)
        solo.trainer.crash()
        await solo.driver.wait_quiet()
        assert solo.machine.tokens_since_contribution == 0
        solo.trainer.is_deaf = False
        await solo.trainer.start()
        await solo.until(lambda: solo.height == 2)
        assert solo.trainer.num_asked_to_contribute >= 3

    run_solo(Disk(tmp_path / "a"), body)


def test_no_trainer_and_nothing_trained_are_not_asked_all_the_time(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 1)
        solo.trainer.has_work = False
        await trio.sleep(60)  # noqa: TID251 - virtual time
        assert solo.height == 1
        num_asked = solo.trainer.num_asked_to_contribute
        assert num_asked < 10
        solo.trainer.has_work = True
        await solo.trainer.step()
        await solo.until(lambda: solo.height == 2)

    run_solo(Disk(tmp_path / "a"), body)


def test_who_signs_two_things_is_banned(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        one = foreign(solo, "")
        two = foreign(solo, hash_of("other"))
        for signed in [*one, *two]:
            await solo.driver.take_record(signed)
        await solo.until(lambda: solo.swarm.banned)
        assert solo.swarm.banned == {PEOPLE[1].peer_id: "two commits for one parent and rank"}

    run_solo(Disk(tmp_path / "a"), body)


@pytest.mark.parametrize("has_gossip", [True, False])
def test_two_members_stand_on_one_chain(tmp_path: Path, has_gossip: bool) -> None:
    network = FakeNetwork(has_gossip=has_gossip)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        disks = [Disk(tmp_path / str(n), PEOPLE[n]) for n in range(2)]
        both = [Solo(disk, nursery, network) for disk in disks]
        for solo in both:
            await solo.start()
            nursery.start_soon(solo.exchange.run, 0.5, lambda: None)
        one, other = both
        await one.until(lambda: one.height >= 4)
        await one.until(lambda: one.machine.tip == other.machine.tip)
        known = one.machine.known
        chain = list(known.chain_down(one.machine.tip or ""))
        authors = {known.contributions[i].author for c in chain for i in known.facts[c].listed}
        assert authors == {PEOPLE[0].peer_id, PEOPLE[1].peer_id}
        assert not one.sent_before_kept
        assert not other.sent_before_kept
        for solo in both:
            verify_never_twice(solo.sent())  # type: ignore[arg-type]
            solo.close()

    run_virtual(in_nursery(main), jumps=True)


def test_a_newcomer_fetches_what_it_lacks(tmp_path: Path) -> None:
    network = FakeNetwork()

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        old = Solo(Disk(tmp_path / "old", PEOPLE[0]), nursery, network)
        await old.start()
        nursery.start_soon(old.exchange.run, 0.5, lambda: None)
        await old.until(lambda: old.height == 12)
        new = Solo(Disk(tmp_path / "new", PEOPLE[1]), nursery, network)
        await new.start()
        nursery.start_soon(new.exchange.run, 0.5, lambda: None)
        await new.until(lambda: new.height >= 12)
        await new.until(lambda: new.machine.tip == old.machine.tip)
        new.close()
        old.close()

    run_virtual(in_nursery(main), jumps=True)


def test_paused_it_keeps_records_and_leaves_the_machine_alone(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 1)
        solo.driver.post(ev.ContributingChanged(False))
        await solo.driver.wait_quiet()
        height, num_asked = solo.height, len(solo.aggregator.asked)
        await trio.sleep(100)  # noqa: TID251 - virtual time
        assert solo.height == height
        assert len(solo.aggregator.asked) <= num_asked + 1
        assert solo.sent()[-1].__struct_config__.tag == "leaving"
        solo.driver.post(ev.ContributingChanged(True))
        await solo.until(lambda: solo.height == height + 1)

    run_solo(Disk(tmp_path / "a"), body)


def test_a_refusal_is_in_the_books_and_survives_a_restart(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "a")

    async def body(solo: Solo) -> None:
        # Of the first contribution: what the next commit makes is computed as soon as it is known.
        solo.aggregator.is_against = lambda i: i == next(iter(solo.machine.own), i)
        await solo.until(lambda: solo.height == 4)
        await solo.keeper.flush()
        assert solo.ledger.stats(None).tokens_refused == TOKENS
        assert solo.ledger.stats(None).tokens_confirmed == solo.keeper.tokens_confirmed

    run_solo(disk, body)

    async def again(solo: Solo) -> None:
        await solo.until(lambda: solo.height >= 4)
        await solo.keeper.flush()
        assert len(solo.keeper.refused) == 1
        assert solo.ledger.stats(None).tokens_refused == TOKENS
        assert solo.ledger.stats(None).tokens_confirmed == solo.keeper.tokens_confirmed

    run_solo(disk, again)


def test_lines_that_a_kill_took_from_the_books_are_written_again(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "a")

    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 3)

    run_solo(disk, body)
    for file in disk.folder.glob("stats.sqlite*"):
        file.unlink()

    async def again(solo: Solo) -> None:
        await solo.until(lambda: solo.trainer.rebases)
        await solo.keeper.flush()
        contributed = sum(c.tokens for c in solo.machine.own.values())
        assert solo.ledger.balance().done == contributed

    run_solo(disk, again)
