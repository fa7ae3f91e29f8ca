"""The driver: on disk before it is sent, never signed twice, and no work lost on the way."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.fakes.members import PEOPLE, hash_of
from tests.fakes.network import FakeNetwork
from tests.fakes.solo import GENESIS_STATE, TOKENS, Disk, Solo, applied
from tests.fakes.virtual_time import in_nursery, run_threads_inline, run_virtual
from volunteer.agent import driver as driver_module
from volunteer.agent.record_book import SignedRecord
from volunteer.errors import StorageFullError
from volunteer.messages import ApplyCommit, BuildGenesis, Encoded, Rebased
from volunteer.rounds import events as ev
from volunteer.rounds.chain import rank_of
from volunteer.rounds.credit import WorkState
from volunteer.rounds.records import Commit, Contribution

Body = Callable[[Solo], Awaitable[None]]


@pytest.fixture(autouse=True)
def virtual_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "now_s", trio.current_time)
    monkeypatch.setattr(trio.to_thread, "run_sync", run_threads_inline)


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


def test_alone_it_commits_round_after_round(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 4)
        known = solo.machine.known
        tip = solo.machine.tip
        assert tip is not None
        assert known.facts[tip].final_height >= 2
        state = GENESIS_STATE
        for commit_id in [*known.chain_down(tip)][::-1][1:]:
            blobs = [known.contributions[i].blob_id for i in known.commits[commit_id].contributions]
            from_state = solo.files.state_hash_of(solo.machine, known.commits[commit_id].parent)
            state = applied(from_state, blobs)
            assert (
                solo.disk.store.file_of(known.commits[commit_id].state_hash).read_bytes() == state
            )
        assert solo.driver.held_out_loss == 2.0
        rebase = solo.trainer.rebases[-1]
        assert (rebase.commit_id, rebase.round_index) == (tip, 4)
        await solo.keeper.flush()
        stats = solo.ledger.stats(None)
        assert stats.tokens_confirmed == solo.keeper.tokens_confirmed > 0
        history = solo.ledger.history(solo.spec.run_id, "dense", 100)
        assert [point.round_index for point in history] == [0, 1, 2, 3, 4]
        assert [point.own_listed for point in history] == [False, True, True, True, True]

    run_solo(Disk(tmp_path / "a"), body)


def fill(solo: Solo) -> Callable[[], None]:
    """Fill the disk of the record log; return what empties it."""
    append, note = solo.record_log.append, solo.record_log.note

    def full(*args: object, **more: object) -> None:
        raise StorageFullError("no space left to write records")

    solo.record_log.append = full  # type: ignore[method-assign]
    solo.record_log.note = full  # type: ignore[method-assign]

    def make_room() -> None:
        solo.record_log.append = append  # type: ignore[method-assign]
        solo.record_log.note = note  # type: ignore[method-assign]

    return make_room


def test_what_is_not_on_disk_is_not_sent_and_comes_later(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 1)
        num_sent = len(solo.disk.sent)
        make_room = fill(solo)
        await trio.sleep(20)  # noqa: TID251 - virtual time
        kinds = {record.__struct_config__.tag for record in solo.sent()[num_sent:]}
        assert kinds <= {"close"}, "a hint is not kept anyway"
        assert "no space left" in solo.driver.storage_problem
        assert solo.trainer.num_asked_to_contribute == 2, "not encoded again and again"
        blob_id = solo.disk.last.blob_id if solo.disk.last else ""
        make_room()
        await solo.until(lambda: solo.height >= 3)
        assert solo.driver.storage_problem == ""
        listed = [c for c in solo.machine.own.values() if c.blob_id == blob_id]
        assert len(listed) == 1, "the very work that the disk did not take"
        assert (
            solo.machine.work_states()[
                next(i for i, c in solo.machine.own.items() if c.blob_id == blob_id)
            ]
            is WorkState.LISTED
        )

    run_solo(Disk(tmp_path / "a"), body)


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


class KillAtStep(trio.abc.Instrument):
    """Cancels everything at one task step."""

    def __init__(self, step: int) -> None:
        self.scope = trio.CancelScope()
        self.num_steps = 0
        self._step = step

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.num_steps += 1
        if self.num_steps == self._step:
            self.scope.cancel()


def run_killed(disk: Disk, step: int, until_height: int) -> tuple[int, int]:
    """Run until a height or the kill; return (height reached, steps taken)."""
    reached = -1
    instrument = KillAtStep(step)

    async def main(nursery: trio.Nursery, clock: MockClock) -> None:
        nonlocal reached
        trio.lowlevel.add_instrument(instrument)
        solo = Solo(disk, nursery)
        # The real kill does not wait for the nursery; nothing of ours writes while it unwinds.
        with instrument.scope:
            async with trio.open_nursery() as inner:
                solo._nursery = solo.trainer.nursery = inner
                await solo.start()
                await solo.until(lambda: solo.height >= until_height)
                inner.cancel_scope.cancel()
        reached = solo.height
        trio.lowlevel.remove_instrument(instrument)
        assert not solo.sent_before_kept
        verify_never_twice(solo.sent())  # type: ignore[arg-type]
        solo.close()

    run_virtual(in_nursery(main), jumps=True)
    return reached, instrument.num_steps


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_kill_anywhere_never_makes_it_sign_differently(tmp_path: Path) -> None:
    _, num_steps = run_killed(Disk(tmp_path / "whole"), -1, 3)
    assert num_steps > 200
    num_kills = 30
    disk = Disk(tmp_path / "killed")
    for number in range(num_kills):
        fresh = Disk(tmp_path / f"k{number}")
        run_killed(fresh, 20 + number * (num_steps - 20) // num_kills, 3)
        reached, _ = run_killed(fresh, -1, 4)
        assert reached >= 4, "it goes on"
        run_killed(disk, 150 + 7 * number, 100)  # the same disk again and again
    reached, _ = run_killed(disk, -1, 0)
    assert reached >= 0


def test_a_restart_sends_nothing_that_was_not_sent(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "a")

    async def first(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 2 and solo.machine.closed_at_s is None)

    run_solo(disk, first)
    num_sent = len(disk.sent)

    async def second(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 2)
        await trio.sleep(3)  # noqa: TID251 - virtual time: the round has not ended yet
        assert len(disk.sent) == num_sent
        assert solo.aggregator.asked, "evaluated"
        assert not any(isinstance(c, BuildGenesis | ApplyCommit) for c in solo.aggregator.asked)
        await solo.until(lambda: solo.height == 3)

    run_solo(disk, second)


def test_what_a_kill_kept_from_being_announced_is_announced(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "a")

    async def first(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 1)

    run_solo(disk, first)
    blob_id = disk.store.add_bytes(b"encoded, never announced")
    old = os.stat(disk.store.file_of(blob_id)).st_mtime - 86400
    os.utime(disk.store.file_of(blob_id), (old, old))

    async def second(solo: Solo) -> None:
        await solo.until(lambda: solo.machine.tip)
        tip = solo.machine.tip
        assert tip is not None
        disk.last = Encoded(
            base=tip,
            round_index=1,
            blob_id=blob_id,
            blob_bytes=10,
            codec="int4",
            codec_version=1,
            tokens=TOKENS,
            carries=(),
        )
        await solo.trainer.start()
        solo.driver.post(ev.ContributingChanged(True))
        await solo.until(lambda: solo.height >= 3)
        assert any(c.blob_id == blob_id for c in solo.machine.own.values())
        assert disk.store.has(blob_id), "an old file, and still needed"

    run_solo(disk, second, is_contributing=False)


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


async def make_pending(solo: Solo) -> str:
    """Let one own contribution come to nothing; return its id."""
    await solo.until(lambda: solo.height == 3)
    known = solo.machine.known
    work = Contribution(
        run_id=solo.spec.run_id,
        module_id="dense",
        round_index=0,
        author=solo.disk.who.peer_id,
        base=solo.machine.rules.genesis_id,
        vote=False,
        blob_id=solo.disk.store.add_bytes(b"never listed"),
        blob_bytes=12,
        codec="int4",
        codec_version=1,
        tokens=TOKENS,
    )
    signed = solo.book.sign(work)
    assert signed.record_id not in known.contributions
    # As an earlier run of this agent would have left it.
    await solo.driver.take_record(signed)
    await solo.driver.wait_quiet()
    solo.keeper.note_own(signed.record_id)
    solo.trainer.has_work = False
    return signed.record_id


def test_pending_work_is_carried_with_its_blob(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        lost = await make_pending(solo)
        await solo.until(lambda: solo.machine.work_states()[lost] is WorkState.PENDING)
        await solo.until(lambda: solo.trainer.rebases[-1].pending == (lost,))
        works = {work.contribution_id: work for work in solo.trainer.rebases[-1].works}
        assert works[lost].new_tokens == TOKENS
        assert works[lost].blob_id == solo.machine.own[lost].blob_id

    run_solo(Disk(tmp_path / "a"), body)


def test_pending_work_whose_blob_is_gone_is_dropped_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(tmp_path / "a")
    dropped = []

    async def body(solo: Solo) -> None:
        lost = await make_pending(solo)
        dropped.append(lost)
        disk.store.delete(solo.machine.own[lost].blob_id)
        solo.trainer.commands.clear()
        await solo.trainer.start()
        await solo.until(lambda: solo.machine.work_states()[lost] is WorkState.DROPPED)
        await solo.until(lambda: ("dropped", lost) in solo.record_log.notes())
        assert all(lost not in rebase.pending for rebase in solo.trainer.rebases)
        assert "no longer on this disk" in caplog.text
        await solo.keeper.flush()
        assert solo.ledger.balance().dropped == TOKENS

    run_solo(disk, body)

    async def again(solo: Solo) -> None:
        await solo.until(lambda: solo.trainer.rebases)
        assert solo.machine.work_states()[dropped[0]] is WorkState.DROPPED
        assert not solo.trainer.rebases[-1].pending

    run_solo(disk, again)


def test_a_snapshot_that_was_too_old_is_in_the_books(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 1)
        await solo.keeper.flush()
        solo.keeper.note_totals(10 * TOKENS, 10)
        await solo.driver.on_trainer_event(
            Rebased(commit_id="c", carried=(), discarded_tokens=TOKENS)
        )
        await solo.keeper.flush()
        assert solo.ledger.balance().dropped == TOKENS

    run_solo(Disk(tmp_path / "a"), body)


def test_pruning_keeps_what_is_needed(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "a")
    strays = [disk.store.add_bytes(f"stray {i}".encode()) for i in range(3)]

    async def body(solo: Solo) -> None:
        for blob_id in strays:
            old = os.stat(disk.store.file_of(blob_id)).st_mtime - 86400
            os.utime(disk.store.file_of(blob_id), (old, old))
        journal = solo.spec.rounds.journal_rounds
        await solo.until(lambda: solo.height == 1)
        for blob_id in disk.store.list_ids():
            os.utime(disk.store.file_of(blob_id), (old, old))
        await solo.until(lambda: solo.height == journal + 3)
        await solo.until(lambda: not any(disk.store.has(stray) for stray in strays))
        known = solo.machine.known
        for commit_id in known.chain_down(solo.machine.tip or ""):
            height = known.facts[commit_id].height
            if height > 3:
                assert commit_id in known.states
                assert disk.store.has(known.commits[commit_id].state_hash)
        assert solo.machine.rules.genesis_id not in known.states
        assert not disk.store.has(solo.spec.genesis.state_hash)

    run_solo(disk, body)


def test_two_prunes_at_once_hurt_nobody(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "a")

    async def body(solo: Solo) -> None:
        list_ids = disk.store.list_ids
        gone = hash_of("deleted by the other")
        disk.store.list_ids = lambda: (gone, *list_ids())  # type: ignore[method-assign]
        solo.files._delete_others(set())
        await solo.until(lambda: solo.height == 2)

    run_solo(disk, body)


def test_a_state_that_was_pruned_is_computed_again(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 1)
        tip = solo.machine.tip or ""
        commit = solo.machine.known.commits[tip]
        solo.disk.store.delete(commit.state_hash)
        solo.driver.post(ev.StateDropped(tip))
        await solo.driver.wait_quiet()
        assert tip not in solo.machine.known.states
        await solo.until(lambda: tip in solo.machine.known.states)
        assert solo.disk.store.has(commit.state_hash)

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
        await solo.until(lambda: solo.machine.own)
        work = next(iter(solo.machine.own))
        solo.aggregator.refused[work] = "against all others"
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
