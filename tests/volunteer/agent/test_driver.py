"""The driver: on disk before it is sent, and never signed twice, wherever it is killed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from tests.fakes.solo import GENESIS_STATE, TOKENS, Disk, Solo, applied
from tests.fakes.solo_runs import run_solo, verify_never_twice
from tests.fakes.virtual_time import in_nursery, run_virtual
from volunteer.errors import StorageFullError
from volunteer.messages import ApplyCommit, BuildGenesis, Encoded
from volunteer.rounds import events as ev
from volunteer.rounds.credit import WorkState

pytestmark = pytest.mark.usefixtures("virtual_now")


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
        assert solo.driver.held_out is not None
        assert solo.driver.held_out.held_out_loss == 2.0
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
