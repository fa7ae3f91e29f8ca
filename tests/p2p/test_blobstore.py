"""The blob store: ids, atomic appearance, and downloads that are believed chunk by chunk."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from p2p.blobstore import (
    CHUNK_BYTES,
    BlobStore,
    blob_id_of_bytes,
    blob_id_of_file,
    hash_chunks,
    is_blob_id,
)
from p2p.errors import BlobCorruptError, BlobStoreFullError, BlobUnavailableError
from p2p.partial_blob import PartialBlob

SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 7)


def bytes_of(size_bytes: int) -> bytes:
    """Make bytes of which no two chunks are alike."""
    return blake3(b"test").digest(length=size_bytes)


def keep_chunk(store: BlobStore, partial: PartialBlob, index: int, chunk: bytes) -> None:
    """Do what a download does with a chunk."""
    partial.verify_chunk(index, chunk)
    store.write_partial_chunks(partial, {index: chunk})


class PowerCut(BaseException):
    """Stands for kill -9: nothing in the program catches it."""


@pytest.mark.parametrize("size_bytes", SIZES)
def test_the_id_is_what_the_protocol_says(tmp_path: Path, size_bytes: int) -> None:
    data = bytes_of(size_bytes)
    pieces = [data[start : start + CHUNK_BYTES] for start in range(0, size_bytes, CHUNK_BYTES)]
    expected = blake3(
        b"allmende/blob/1"
        + size_bytes.to_bytes(8, "little")
        + b"".join(blake3(p).digest() for p in pieces)
    ).hexdigest()
    (tmp_path / "file").write_bytes(data)
    assert blob_id_of_bytes(data) == blob_id_of_file(tmp_path / "file") == expected
    assert hash_chunks(tmp_path / "file") == tuple(blake3(p).digest() for p in pieces)


def test_the_id_is_pinned() -> None:
    assert (
        blob_id_of_bytes(b"") == "bd843a223cab9f5b42404ad2a0f9cc6e08c5f2bbfeb6bf4026126f0aeabd3463"
    )
    assert (
        blob_id_of_bytes(b"allmende")
        == "1f106804fb64f704664e6e65dd59a8a35c1d60d2d0fb47fd2045543b49b3a859"
    )


@given(st.text(max_size=70))
def test_no_other_file_can_be_named(text: str) -> None:
    assert is_blob_id(text) == (len(text) == 64 and all(c in "0123456789abcdef" for c in text))


@pytest.mark.parametrize("bad", ["../etc/passwd", "", "AB" * 32, "ab" * 31 + "a", "ab" * 32 + "/"])
def test_a_bad_id_is_refused(tmp_path: Path, bad: str) -> None:
    store = BlobStore(tmp_path)
    for method in (
        store.file_of,
        store.has,
        store.size_bytes,
        store.delete,
        store.verify,
        store.chunk_hashes,
    ):
        with pytest.raises(ValueError, match="no blob id"):
            method(bad)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_what_is_added_is_there_in_chunks(tmp_path: Path, size_bytes: int) -> None:
    store, data = BlobStore(tmp_path / "store"), bytes_of(size_bytes)
    blob_id = store.add_bytes(data)
    assert store.add_bytes(data) == blob_id
    assert store.has(blob_id)
    assert store.verify(blob_id)
    assert store.list_ids() == (blob_id,)
    assert store.size_bytes(blob_id) == size_bytes
    num_chunks = len(store.chunk_hashes(blob_id))
    assert b"".join(store.read_chunk(blob_id, index) for index in range(num_chunks)) == data
    with pytest.raises(BlobUnavailableError):
        store.read_chunk(blob_id, num_chunks)
    store.delete(blob_id)
    assert not store.has(blob_id)
    assert os.listdir(store.directory) == []


def test_a_file_is_adopted_once(tmp_path: Path) -> None:
    store, data = BlobStore(tmp_path / "store"), bytes_of(CHUNK_BYTES + 5)
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(data)
        blob_id = store.adopt_file(tmp_path / name)
        assert not (tmp_path / name).exists()
    assert blob_id == blob_id_of_bytes(data)
    assert store.verify(blob_id)


def test_a_file_from_another_disk_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path / "store")
    source = tmp_path / "file"
    source.write_bytes(b"from afar")
    replace = Path.replace

    def replace_here(self: Path, target: Path) -> Path:
        if self == source:
            raise OSError(errno.EXDEV, "cross-device link")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replace_here)
    assert store.verify(store.adopt_file(source))
    assert not source.exists()


def test_absent_blobs_say_so(tmp_path: Path) -> None:
    store, absent = BlobStore(tmp_path), "ab" * 32
    assert not store.has(absent)
    assert not store.verify(absent)
    for method in (store.size_bytes, store.chunk_hashes):
        with pytest.raises(BlobUnavailableError):
            method(absent)


def test_damage_on_the_disk_is_noticed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    blob_id = store.add_bytes(bytes_of(2 * CHUNK_BYTES))
    content = bytearray(store.file_of(blob_id).read_bytes())
    content[CHUNK_BYTES + 3] ^= 1
    store.file_of(blob_id).write_bytes(content)
    assert not store.verify(blob_id)
    assert len(store.read_chunk(blob_id, 0)) == CHUNK_BYTES
    with pytest.raises(BlobCorruptError):
        store.read_chunk(blob_id, 1)
    (tmp_path / f"{blob_id}.hashes").unlink()
    with pytest.raises(BlobCorruptError):
        BlobStore(tmp_path).chunk_hashes(blob_id)


@pytest.mark.parametrize("content", [b"", b"x" * 40, b"\xff" * 72])
def test_a_meddled_list_of_hashes_is_not_believed(tmp_path: Path, content: bytes) -> None:
    data = bytes_of(2 * CHUNK_BYTES)
    blob_id = BlobStore(tmp_path).add_bytes(data)
    (tmp_path / f"{blob_id}.hashes").write_bytes(content)
    assert BlobStore(tmp_path).read_chunk(blob_id, 1) == data[CHUNK_BYTES:]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "space"),
        (errno.EDQUOT, "space"),
        (errno.EROFS, "dmesg"),
        (errno.EIO, "dmesg"),
    ],
)
def test_a_disk_that_takes_nothing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    store = BlobStore(tmp_path / "store")

    def full(_descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(BlobStoreFullError) as caught:
            store.add_bytes(b"data")
    assert words in caught.value.hint
    assert os.listdir(store.directory) == []


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("at", range(3))
def test_a_kill_at_any_write_leaves_all_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, at: int
) -> None:
    """Cut the power at the nth sync or rename; then a whole blob is there, or none."""
    store, data = BlobStore(tmp_path), bytes_of(CHUNK_BYTES + 1)
    calls = 0
    owner: object = os if call == "fsync" else Path
    original = getattr(owner, call)

    def cut(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls > at:
            raise PowerCut
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, call, cut)
        if at >= 2:
            store.add_bytes(data)  # data and folder, data and hashes: there is no third
        else:
            with pytest.raises(PowerCut):
                store.add_bytes(data)
    again = BlobStore(tmp_path)
    blob_id = blob_id_of_bytes(data)
    assert not again.has(blob_id) or again.verify(blob_id)
    assert again.add_bytes(data) == blob_id
    assert again.verify(blob_id)


def test_what_is_in_memory_is_read_without_waiting(tmp_path: Path) -> None:
    data = bytes_of(CHUNK_BYTES + 9)
    store = BlobStore(tmp_path)
    blob_id = store.add_bytes(data)
    assert store.read_cached_chunk(blob_id, 0) is None  # its hashes are not known yet
    store.chunk_hashes(blob_id)
    assert bytes(store.read_cached_chunk(blob_id, 1) or b"") == data[CHUNK_BYTES:]
    assert store.read_cached_chunk(blob_id, 2) is None
    with store.file_of(blob_id).open("r+b") as file:
        file.write(b"damage")
    assert store.read_cached_chunk(blob_id, 0) is None
    store.delete(blob_id)
    assert store.read_cached_chunk(blob_id, 1) is None


def test_blobs_need_no_room_for_their_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)

    def full(_file: Path, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        blob_id = store.add_bytes(b"data")
    assert os.listdir(tmp_path) == [blob_id]
    assert store.read_chunk(blob_id, 0) == b"data"


def test_only_dead_writers_leftovers_are_removed(tmp_path: Path) -> None:
    live, dead = tmp_path / f".tmp-{os.getpid()}-aa", tmp_path / ".tmp-999999999-bb"
    live.write_bytes(b"being written")
    dead.write_bytes(b"left behind")
    BlobStore(tmp_path)
    assert os.listdir(tmp_path) == [live.name]


def test_a_download_resumes_with_what_verifies(tmp_path: Path) -> None:
    data = bytes_of(3 * CHUNK_BYTES + 9)
    source, store = BlobStore(tmp_path / "source"), BlobStore(tmp_path / "store")
    blob_id = source.add_bytes(data)
    hashes = source.chunk_hashes(blob_id)
    partial = store.open_partial(blob_id, len(data), hashes)
    assert partial.missing == {0, 1, 2, 3}
    for index in (1, 3):
        keep_chunk(store, partial, index, source.read_chunk(blob_id, index))
    with pytest.raises(BlobCorruptError):
        keep_chunk(store, partial, 0, source.read_chunk(blob_id, 2))
    with pytest.raises(ValueError, match="lacks 2"):
        store.finish_partial(blob_id, partial)
    partial.close()  # as a kill would
    assert not store.has(blob_id)
    assert store.list_ids() == ()

    with partial.file.open("r+b") as meddled:
        meddled.seek(CHUNK_BYTES + 100)
        meddled.write(b"!")
    resumed = BlobStore(tmp_path / "store").resume_partial(blob_id)
    assert resumed is not None
    assert resumed.missing == {0, 1, 2}
    for index in sorted(resumed.missing):
        keep_chunk(store, resumed, index, source.read_chunk(blob_id, index))
    store.finish_partial(blob_id, resumed)
    assert store.verify(blob_id)
    assert sorted(os.listdir(store.directory)) == [blob_id, f"{blob_id}.hashes"]


def test_a_download_needs_the_right_manifest(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    hashes = (blake3(b"x").digest(),)
    blob_id = blob_id_of_bytes(b"x")
    for size_bytes, wrong in ((2, hashes), (1, ()), (1, hashes * 2), (1, (bytes(32),))):
        with pytest.raises(BlobCorruptError):
            store.open_partial(blob_id, size_bytes, wrong)
    assert os.listdir(tmp_path) == []
    assert store.resume_partial(blob_id) is None


def test_a_download_on_a_full_disk_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)
    blob_id = blob_id_of_bytes(b"x")
    partial = store.open_partial(blob_id, 1, (blake3(b"x").digest(),))

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(BlobStoreFullError):
            store.write_partial_chunks(partial, {0: b"x"})
    assert partial.missing == {0}
    partial.close()
    assert not store.has(blob_id)


def test_a_download_that_cannot_fit_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)
    usage = type("Usage", (), {"free": CHUNK_BYTES - 1})
    monkeypatch.setattr("p2p.partial_blob.shutil.disk_usage", lambda _directory: usage)
    with pytest.raises(BlobStoreFullError):
        store.open_partial(blob_id_of_bytes(b"x"), 1, (blake3(b"x").digest(),))


@pytest.mark.parametrize(
    "cuts", [(0,), (5,), (CHUNK_BYTES,), (7, CHUNK_BYTES + 7, 2 * CHUNK_BYTES + 1)]
)
def test_what_lies_in_pieces_is_the_blob_of_all_its_bytes(
    tmp_path: Path, cuts: tuple[int, ...]
) -> None:
    data = os.urandom(2 * CHUNK_BYTES + 100)
    edges = (0, *cuts, len(data))
    parts = [memoryview(data)[a:b] for a, b in itertools.pairwise(edges)]
    store = BlobStore(tmp_path)
    blob_id = store.add_parts(parts)
    assert blob_id == blob_id_of_bytes(data)
    assert store.file_of(blob_id).read_bytes() == data
    assert store.verify(blob_id)
