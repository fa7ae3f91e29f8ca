"""Files that were found right are not read again, and any other file is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from p2p.blobstore import BlobStore
from p2p.errors import BlobCorruptError, BlobUnavailableError
from volunteer.training import seen_files
from volunteer.training.seen_files import SeenFiles


class CountingStore(BlobStore):
    """Counts how often a blob is read."""

    num_read = 0

    def verify(self, blob_id: str) -> bool:
        self.num_read += 1
        return super().verify(blob_id)


def test_a_blob_is_read_once(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    blob_id = store.add_bytes(b"one")
    seen = SeenFiles(store)
    seen.verify(blob_id)
    seen.verify(blob_id)
    assert store.num_read == 1


def test_what_was_just_made_is_not_read(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    blob_id = store.add_bytes(b"one")
    seen = SeenFiles(store)
    seen.note_made(blob_id)
    seen.verify(blob_id)
    assert store.num_read == 0


def test_a_file_that_was_changed_is_read_again_and_refused(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    blob_id = store.add_bytes(b"one")
    seen = SeenFiles(store)
    seen.verify(blob_id)
    seen.note_checked(blob_id, "reading")
    store.file_of(blob_id).write_bytes(b"two")
    with pytest.raises(BlobCorruptError):
        seen.verify(blob_id)
    assert not seen.is_checked(blob_id, "reading")


def test_a_file_that_took_its_place_with_its_times_is_read_again(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    blob_id = store.add_bytes(b"one")
    file = store.file_of(blob_id)
    seen = SeenFiles(store)
    seen.verify(blob_id)
    times = file.stat()
    other = tmp_path / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(file)
    with pytest.raises(BlobCorruptError):
        seen.verify(blob_id)


def test_what_is_gone_or_no_blob_is_not_there(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    blob_id = store.add_bytes(b"one")
    seen = SeenFiles(store)
    seen.verify(blob_id)
    store.delete(blob_id)
    for text in (blob_id, "../../etc/passwd"):
        with pytest.raises(BlobUnavailableError):
            seen.verify(text)


def test_checks_are_for_one_thing_and_end_with_what_was_verified(tmp_path: Path) -> None:
    store = CountingStore(tmp_path)
    blob_id = store.add_bytes(b"one")
    seen = SeenFiles(store)
    seen.note_checked(blob_id, "reading")
    assert not seen.is_checked(blob_id, "reading"), "it was never verified"
    seen.verify(blob_id)
    seen.note_checked(blob_id, "reading")
    assert seen.is_checked(blob_id, "reading")
    assert not seen.is_checked(blob_id, "writing")


def test_the_oldest_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen_files, "MAX_SEEN", 2)
    store = CountingStore(tmp_path)
    seen = SeenFiles(store)
    ids = [store.add_bytes(bytes([number])) for number in range(3)]
    for blob_id in (*ids, ids[2], ids[0]):
        seen.verify(blob_id)
    assert store.num_read == 4
