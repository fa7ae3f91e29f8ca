"""A damaged checkpoint is put aside and the one before is used (checkpoint/FORMAT.md, Loading)."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3

from tests.fakes.checkpoints import (
    loaded_step,
    names,
    save,
    verify_every_manifest_has_its_payload,
    whole_folder,
)
from tests.fakes.disk import Crash, CrashingDisk, KilledError
from volunteer.checkpoint import manifest as manifest_format
from volunteer.checkpoint.manifest import (
    Manifest,
    encode_latest,
    encode_manifest,
    parse_latest,
    parse_manifest,
)
from volunteer.checkpoint.store import MAX_QUARANTINED, CheckpointStore
from volunteer.errors import CheckpointCorruptError, CheckpointTooNewError


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
