"""A checkpoint is the old one or the new one wherever a save is stopped (checkpoint/FORMAT.md)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from io import RawIOBase
from pathlib import Path

import pytest

from tests.fakes.checkpoints import (
    damage_latest,
    loaded_step,
    names,
    save,
    verify_every_manifest_has_its_payload,
    whole_folder,
    writer_of,
)
from tests.fakes.disk import Crash, CrashingDisk, KilledError
from tests.fakes.tiny_disk import mounted_tiny_disk
from volunteer.checkpoint import store as store_module
from volunteer.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
)
from volunteer.checkpoint.store import CheckpointStore
from volunteer.errors import StorageFullError


@pytest.fixture(autouse=True)
def cheap_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake disk models what fsync is for; waiting for the real one takes most of the time."""
    monkeypatch.setattr(os, "fsync", os.fstat)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the checkpoints of steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path / "trainer", step)
    return tmp_path / "trainer"


# ---------------------------------------------------------------------------------- saving


def test_a_save_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "trainer"
    assert CheckpointStore(folder).load() is None
    for step in (1, 2, 3, 4):
        save(folder, step)
        assert loaded_step(folder) == step
    assert names(folder) == whole_folder(3, 4)


def test_more_or_fewer_may_be_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for step in (1, 2):
        store.save(writer_of(step), {"step": step})
    assert names(tmp_path) == whole_folder(2)
    with pytest.raises(ValueError, match="at least one"):
        CheckpointStore(tmp_path, keep=0)


def test_a_saved_payload_does_not_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[Path] = []
    monkeypatch.setattr(store_module, "drop_from_cache", dropped.append)
    save(tmp_path, 1)
    assert dropped == list(tmp_path.glob("payload-*"))


def test_an_empty_payload_is_a_payload(tmp_path: Path) -> None:
    CheckpointStore(tmp_path).save(Path.touch, {})
    loaded = CheckpointStore(tmp_path).load()
    assert loaded is not None
    assert loaded.payload_file.read_bytes() == b""


def test_the_order_of_writes_is_the_documented_one(folder: Path) -> None:
    with CrashingDisk(folder) as disk:
        save(folder, 3)
    replacing = ["open", "write", "fsync", "replace", "fsync folder"]
    payload = ["open", "write", "write", "write", "fsync", "fsync folder"]
    deleting = ["unlink", "fsync folder", "unlink", "fsync folder"]
    assert disk.calls == payload + replacing + replacing + deleting


NUM_CALLS = 6 + 5 + 5 + 4
RENAMED_LATEST = 6 + 5 + 3  # the call that makes the new one count


@pytest.mark.parametrize("crash", Crash)
@pytest.mark.parametrize("stop_at", range(NUM_CALLS))
def test_a_stop_at_any_call_of_a_save_leaves_the_old_or_the_new(
    folder: Path, stop_at: int, crash: Crash
) -> None:
    disk = CrashingDisk(folder, stop_at=stop_at)
    with disk, pytest.raises(KilledError):
        save(folder, 3)
    disk.crash(crash)
    verify_every_manifest_has_its_payload(folder)
    is_latest = stop_at > RENAMED_LATEST + (crash is Crash.POWER_CUT)
    assert loaded_step(folder) == (3 if is_latest else 2)
    assert "quarantine" not in names(folder)
    save(folder, 4)
    assert loaded_step(folder) == 4
    assert len(names(folder)) == len(whole_folder(1, 2))
    damage_latest(folder)
    assert loaded_step(folder) == (3 if is_latest else 2), "never one that was not relied on"


@pytest.mark.parametrize("crash", Crash)
@pytest.mark.parametrize("stop_at", range(1 + NUM_CALLS - 4))
def test_a_stop_at_any_call_of_the_first_save_leaves_none_or_the_new(
    tmp_path: Path, stop_at: int, crash: Crash
) -> None:
    folder = tmp_path / "trainer"
    folder.mkdir()
    disk = CrashingDisk(folder, stop_at=stop_at)
    with disk:
        try:
            save(folder, 1)
        except KilledError:
            is_finished = False
        else:
            is_finished = True
    disk.crash(crash)
    verify_every_manifest_has_its_payload(folder)
    assert loaded_step(folder) in ({1} if is_finished else {None, 1})
    assert "quarantine" not in names(folder)
    save(folder, 2)
    assert loaded_step(folder) == 2


@pytest.mark.parametrize("crash", Crash)
@pytest.mark.parametrize("first_stop", [3, 8, 11, 13])
@pytest.mark.parametrize("stop_at", range(8))
def test_a_stop_while_leftovers_are_deleted_leaves_the_old(
    folder: Path, first_stop: int, stop_at: int, crash: Crash
) -> None:
    disk = CrashingDisk(folder, stop_at=first_stop)
    with disk, pytest.raises(KilledError):
        save(folder, 3)
    disk = CrashingDisk(folder, stop_at=stop_at)
    with disk, pytest.raises(KilledError):
        save(folder, 4)
    disk.crash(crash)
    verify_every_manifest_has_its_payload(folder)
    assert loaded_step(folder) == 2
    assert "quarantine" not in names(folder)
    save(folder, 5)
    assert loaded_step(folder) == 5


@pytest.mark.parametrize("stop_at", range(NUM_CALLS))
def test_a_full_disk_leaves_the_old_or_the_new_and_no_leftovers(folder: Path, stop_at: int) -> None:
    disk = CrashingDisk(folder, stop_at=stop_at, error=errno.ENOSPC)
    with disk, pytest.raises(StorageFullError):
        save(folder, 3)
    assert loaded_step(folder) == (3 if stop_at > RENAMED_LATEST else 2)
    save(folder, 4)
    assert loaded_step(folder) == 4
    assert len(names(folder)) == len(whole_folder(1, 2))


def test_a_writer_that_fails_leaves_the_old(folder: Path) -> None:
    def fail(file: Path) -> None:
        file.write_bytes(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        CheckpointStore(folder).save(fail, {})
    assert names(folder) == whole_folder(1, 2)
    assert loaded_step(folder) == 2


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), object(), "x" * MAX_MANIFEST_BYTES],
    ids=["nan", "inf", "object", "large"],
)
def test_metadata_that_json_cannot_hold_is_refused(folder: Path, value: object) -> None:
    with pytest.raises(ValueError, match=r"JSON|allowed"):
        CheckpointStore(folder).save(writer_of(3), {"value": value})  # type: ignore[dict-item]
    assert names(folder) == whole_folder(1, 2)


# ------------------------------------------------------------------------------ the real thing

_SAVE_FOREVER = """
import os, sys
from pathlib import Path
from itertools import count
from tests.fakes.checkpoints import save
for step in count(1):
    save(Path(sys.argv[1]), step)
    print(step, flush=True)
"""


@pytest.mark.system
@pytest.mark.parametrize("num_saves", [1, 4])
def test_kill_9_leaves_the_last_reported_checkpoint_or_a_later_one(
    tmp_path: Path, num_saves: int
) -> None:
    command = [sys.executable, "-c", _SAVE_FOREVER, str(tmp_path / "trainer")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for _ in range(num_saves):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
        reported = [*range(1, num_saves + 1), *map(int, child.stdout.read().split())]
    assert loaded_step(tmp_path / "trainer") in (reported[-1], reported[-1] + 1)


def fill(stream: RawIOBase) -> None:
    while True:
        stream.write(b"x" * 4096)


@pytest.mark.system
def test_a_really_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    with mounted_tiny_disk(tmp_path / "tiny", size_kib=256) as disk:
        folder, filler = disk / "trainer", disk / "filler"
        save(folder, 1)
        with filler.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
            fill(stream)
        with pytest.raises(StorageFullError):
            save(folder, 2)
        assert loaded_step(folder) == 1
        assert names(folder) == whole_folder(1)
        filler.unlink()
        save(folder, 3)
        assert loaded_step(folder) == 3
