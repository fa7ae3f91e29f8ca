"""A checkpoint is the old one or the new one (checkpoint/FORMAT.md), whatever happens."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from io import RawIOBase
from pathlib import Path

import pytest
from blake3 import blake3

from tests.fakes.disk import Crash, CrashingDisk, KilledError
from tests.fakes.tiny_disk import mounted_tiny_disk
from volunteer.checkpoint import manifest as manifest_format
from volunteer.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    encode_latest,
    encode_manifest,
    parse_latest,
    parse_manifest,
)
from volunteer.checkpoint.store import MAX_QUARANTINED, CheckpointStore
from volunteer.errors import CheckpointCorruptError, CheckpointTooNewError, StorageFullError


@pytest.fixture(autouse=True)
def cheap_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake disk models what fsync is for; waiting for the real one takes most of the time."""
    monkeypatch.setattr(os, "fsync", os.fstat)


def payload_of(step: int) -> bytes:
    return b"%08d" % step * 300


def writer_of(step: int) -> Callable[[Path], None]:
    """Return a writer that goes through `os`, so that the fake disk sees it."""

    def write(file: Path) -> None:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            for start in (0, 1000, 2000):
                rest = payload_of(step)[start : start + 1000]
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)

    return write


def save(folder: Path, step: int) -> None:
    CheckpointStore(folder).save(writer_of(step), {"step": step, "weights": [0.5, None, "é"]})


def loaded_step(folder: Path) -> int | None:
    """Return the step of what `load` gives, after checking that it is no mixture."""
    loaded = CheckpointStore(folder).load()
    if loaded is None:
        return None
    step = loaded.metadata["step"]
    assert isinstance(step, int)
    assert loaded.payload_file.read_bytes() == payload_of(step)
    assert loaded.metadata == {"step": step, "weights": [0.5, None, "é"]}
    return step


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def verify_every_manifest_has_its_payload(folder: Path) -> None:
    manifests = {file.stem[-8:] for file in folder.glob("manifest-*.json")}
    assert manifests <= {file.stem[-8:] for file in folder.glob("payload-*.safetensors")}


def whole_folder(*sequences: int) -> list[str]:
    manifests = [f"manifest-{n:08d}.json" for n in sequences]
    return ["LATEST", *manifests, *(f"payload-{n:08d}.safetensors" for n in sequences)]


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


# --------------------------------------------------------------------------------- loading


def damage_latest(folder: Path) -> None:
    newest = max(folder.glob("payload-*"))
    newest.write_bytes(newest.read_bytes()[:-1])


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\n")


def empty(file: Path) -> None:
    file.write_bytes(b"")


def replace_by_folder(file: Path) -> None:
    file.unlink()
    (file / "inner").mkdir(parents=True)


def flip(position: int) -> Callable[[Path], None]:
    def flip_bit(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[position] ^= 1
        file.write_bytes(data)

    return flip_bit


DAMAGES = [truncate, lengthen, empty, Path.unlink, replace_by_folder, flip(0), flip(20), flip(-2)]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["payload-00000002.safetensors", "manifest-00000002.json"])
def test_a_damaged_checkpoint_is_quarantined_and_the_one_before_is_used(
    folder: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / name)
    assert loaded_step(folder) == 1
    assert "manifest-00000002.json" not in names(folder)
    moved = os.listdir(folder / "quarantine") if (folder / "quarantine").exists() else []
    assert name in moved or damage in (Path.unlink,)
    save(folder, 3)
    assert loaded_step(folder) == 3
    assert [other for other in names(folder) if other != "quarantine"] == whole_folder(1, 2)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_latest_is_repaired(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder / "LATEST")
    assert loaded_step(folder) == 2
    assert parse_latest((folder / "LATEST").read_bytes()) == 2


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_save_without_a_load_also_survives_damage(
    folder: Path, damage: Callable[[Path], None]
) -> None:
    for name in [*os.listdir(folder)]:
        damage(folder / name)
    save(folder, 3)
    assert loaded_step(folder) == 3
    save(folder, 4)
    save(folder, 5)
    assert [name for name in names(folder) if name != "quarantine"] == whole_folder(
        *sorted(int(name[8:16]) for name in names(folder) if name.startswith("payload"))
    )
    assert loaded_step(folder) == 5


def test_no_whole_checkpoint_means_none_and_an_error_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in folder.glob("payload-*"):
        truncate(file)
    assert loaded_step(folder) is None
    assert "no checkpoint is usable" in caplog.text
    assert names(folder) == ["LATEST", "quarantine"]
    assert loaded_step(folder) is None
    save(folder, 3)
    assert loaded_step(folder) == 3


def test_a_manifest_of_another_checkpoint_is_damage(folder: Path) -> None:
    shutil.copy(folder / "manifest-00000001.json", folder / "manifest-00000002.json")
    assert loaded_step(folder) == 1


@pytest.mark.parametrize("crash", Crash)
@pytest.mark.parametrize("stop_at", range(12))
def test_a_stop_at_any_call_of_a_load_that_falls_back_changes_nothing(
    folder: Path, stop_at: int, crash: Crash
) -> None:
    truncate(folder / "payload-00000002.safetensors")
    disk = CrashingDisk(folder, stop_at=stop_at)
    with disk, pytest.raises(KilledError):
        CheckpointStore(folder).load()
    disk.crash(crash)
    verify_every_manifest_has_its_payload(folder)
    assert loaded_step(folder) == 1
    save(folder, 3)
    assert loaded_step(folder) == 3


def test_loading_needs_no_space(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    truncate(folder / "payload-00000002.safetensors")
    with CrashingDisk(folder, stop_at=0, error=errno.ENOSPC):
        assert loaded_step(folder) == 1
    assert "stays in place" in caplog.text
    assert "LATEST not repaired" in caplog.text
    assert loaded_step(folder) == 1


def test_quarantine_does_not_grow(folder: Path) -> None:
    for step in range(3, 12):
        save(folder, step)
        newest = max(folder.glob("payload-*"))
        (replace_by_folder if step % 2 else truncate)(newest)
        assert loaded_step(folder) is not None
    assert len(os.listdir(folder / "quarantine")) == MAX_QUARANTINED


def test_a_read_that_may_succeed_later_is_no_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path) -> str:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr("volunteer.checkpoint.store.hash_file", refuse)
    with pytest.raises(OSError, match="no memory"):
        CheckpointStore(folder).load()
    assert names(folder) == whole_folder(1, 2)


def test_a_bad_sector_is_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_hash = manifest_format.hash_file

    def read_bad_sector(file: Path) -> str:
        if file.name == "payload-00000002.safetensors":
            raise OSError(errno.EIO, "bad sector")
        return real_hash(file)

    monkeypatch.setattr("volunteer.checkpoint.store.hash_file", read_bad_sector)
    assert loaded_step(folder) == 1


def sealed(body: object) -> bytes:
    line = json.dumps(body).encode() + b"\n"
    return line + blake3(line).hexdigest().encode() + b"\n"


@pytest.mark.parametrize("name", ["LATEST", "manifest-00000002.json"])
def test_a_newer_version_is_told_and_left_alone(folder: Path, name: str) -> None:
    (folder / name).write_bytes(sealed({"version": 2, "anything": []}))
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(CheckpointTooNewError, match="format 2"):
        CheckpointStore(folder).load()
    if name == "LATEST":
        with pytest.raises(CheckpointTooNewError):
            save(folder, 3)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


MANIFEST = Manifest(
    sequence=7, payload_name="p", payload_bytes=3, payload_hash="ab", metadata={"a": [1, None]}
)


def test_a_manifest_comes_back_and_any_changed_bit_is_seen() -> None:
    data = encode_manifest(MANIFEST)
    assert parse_manifest(data) == MANIFEST
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises(CheckpointCorruptError):
                parse_manifest(bytes(flipped))
        with pytest.raises(CheckpointCorruptError):
            parse_manifest(data[:position])


@pytest.mark.parametrize(
    "body", [[], 1, {}, {"version": "x"}, {"version": 1}, {"version": 1, "sequence": []}]
)
def test_sealed_nonsense_is_damage(body: object) -> None:
    with pytest.raises(CheckpointCorruptError):
        parse_manifest(sealed(body))
    with pytest.raises(CheckpointCorruptError):
        parse_latest(sealed(body))
    assert parse_latest(encode_latest(3)) == 3


# ------------------------------------------------------------------------------ the real thing

_SAVE_FOREVER = """
import os, sys
from pathlib import Path
from itertools import count
from tests.volunteer.test_checkpoint import save
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
