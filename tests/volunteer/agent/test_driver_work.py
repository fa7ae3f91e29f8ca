"""The driver and its own work: carried, dropped with its reason, pruned when nobody needs it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fakes.members import hash_of
from tests.fakes.solo import TOKENS, Disk, Solo
from tests.fakes.solo_runs import run_solo
from volunteer.agent.module_files import SHORT_JOURNAL
from volunteer.messages import Rebased
from volunteer.rounds import events as ev
from volunteer.rounds.credit import WorkState
from volunteer.rounds.records import Contribution

pytestmark = pytest.mark.usefixtures("virtual_now")


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


def test_where_the_disk_is_short_only_the_newest_states_stay(tmp_path: Path) -> None:
    async def body(solo: Solo) -> None:
        await solo.until(lambda: solo.height == 5)
        known = solo.machine.known
        before = {i for i in known.states if known.facts[i].height <= 2}
        assert len(before) >= 2, "the journal is longer"
        solo.files.spare_disk(solo.machine, is_short=True)
        tip = known.facts[solo.machine.tip or ""]
        await solo.driver.wait_quiet()
        old = [i for i in known.chain_down(tip.commit_id) if known.facts[i].height < tip.height - 2]
        assert not known.states.intersection(old)
        hashes = [solo.files.state_hash_of(solo.machine, i) for i in old[:-1]]
        await solo.until(lambda: not any(solo.disk.store.has(one) for one in hashes))
        await solo.until(lambda: solo.height == 8)
        assert len(solo.machine.known.states) <= SHORT_JOURNAL + 2

    run_solo(Disk(tmp_path / "a"), body)
