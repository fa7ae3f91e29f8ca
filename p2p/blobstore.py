"""A folder of content-addressed files. Runs in: every process; several may use one folder.

    <id>           a whole blob; it appears under this name complete and synced, or not at all
    <id>.hashes    its chunk hashes; a cache, believed only where it hashes to the id
    <id>.partial   a download in progress (p2p/partial_blob.py)
    .tmp-<pid>-..  a blob being written; removed when its process is gone

Write order: the data, synced; rename; sync the folder; the hashes. A kill at any point leaves
either the whole blob or none. The hashes are not synced: what a power cut makes of them is noticed,
and they are computed again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import psutil

from p2p.blob_hashes import (
    CHUNK_BYTES,
    MAX_BLOB_BYTES,
    blob_id_of,
    blob_id_of_bytes,
    blob_id_of_file,
    chunk_hash,
    cut_chunks,
    fits_id,
    hash_chunks,
    is_blob_id,
)
from p2p.errors import BlobCorruptError, BlobStoreFullError, BlobUnavailableError, FramingError
from p2p.framing import encode_manifest, parse_manifest
from p2p.page_cache import read_cached
from p2p.partial_blob import PartialBlob, taken_bytes

__all__ = [
    "CHUNK_BYTES",
    "MAX_BLOB_BYTES",
    "BlobStore",
    "blob_id_of_bytes",
    "blob_id_of_file",
    "hash_chunks",
    "is_blob_id",
]

MAX_KNOWN_HASHES: Final = 8  # lists in memory, of at most 512 KiB (1 MiB as objects) each

_TEMP_PREFIX: Final = ".tmp-"
_HASHES_SUFFIX: Final = ".hashes"
_PARTIAL_SUFFIX: Final = ".partial"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY: Final = frozenset({errno.EROFS, errno.EIO})


@contextlib.contextmanager
def _full_disk_is_typed(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _READ_ONLY:
            raise BlobStoreFullError(
                f"{directory} cannot be written: {error.strerror}",
                hint="The system's log (`dmesg`) says why.",
            ) from error
        if error.errno not in _FULL:
            raise
        raise BlobStoreFullError(
            f"the disk that holds {directory} is full", hint="Free some space, or lower the quota."
        ) from error


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())


def fsync_dir(directory: Path) -> None:
    """Make renames in `directory` durable."""
    if os.name == "nt":  # directories cannot be opened there, and NTFS journals renames
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class BlobStore:
    """Content-addressed files in `directory`. Methods block on the disk.

    Every method that takes a `blob_id` raises ValueError where it is none: ids from strangers are
    checked with `is_blob_id` first, so that no other file can be named.
    """

    def __init__(self, directory: Path) -> None:
        """Open the store, making the folder and removing what dead writers left.

        Raises:
            BlobStoreFullError: The folder cannot be made for want of space.
        """
        self.directory = directory
        self._known_hashes: dict[str, tuple[bytes, ...]] = {}
        with _full_disk_is_typed(directory):
            directory.mkdir(parents=True, exist_ok=True)
        self._remove_stale_temp_files()

    def file_of(self, blob_id: str) -> Path:
        """Name the file that holds the blob, whether it is there or not."""
        if not is_blob_id(blob_id):
            raise ValueError(f"{blob_id!r} is no blob id")
        return self.directory / blob_id

    def has(self, blob_id: str) -> bool:
        """Tell whether the whole blob is here."""
        return self.file_of(blob_id).is_file()

    def size_bytes(self, blob_id: str) -> int:
        """Give the blob's length.

        Raises:
            BlobUnavailableError: The blob is not here.
        """
        try:
            return self.file_of(blob_id).stat().st_size
        except FileNotFoundError as error:
            raise BlobUnavailableError(f"blob {blob_id} is not in {self.directory}") from error

    def list_ids(self) -> tuple[str, ...]:
        """List the whole blobs, in the order of their ids."""
        return tuple(sorted(name for name in os.listdir(self.directory) if is_blob_id(name)))

    def partial_bytes(self) -> dict[str, int]:
        """Tell, for each download that is not whole, about how many bytes of it are on the disk."""
        parts = {}
        for file in self.directory.glob(f"*{_PARTIAL_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                parts[file.name.removesuffix(_PARTIAL_SUFFIX)] = taken_bytes(file.stat())
        return parts

    def add_bytes(self, data: bytes) -> str:
        """Store `data`.

        Returns:
            Its blob id.

        Raises:
            BlobStoreFullError: There is no room; nothing is left behind.
        """
        return self.add_parts((memoryview(data),))

    def add_parts(self, parts: Sequence[memoryview]) -> str:
        """Store the bytes of `parts` one after the other, as `add_bytes` does.

        Cost: no copy in memory.
        """
        hashes = tuple(chunk_hash(chunk) for chunk in cut_chunks(parts))
        size_bytes = sum(map(len, parts))
        blob_id = blob_id_of(size_bytes, hashes)
        if not self.has(blob_id):
            self._write_file(self.file_of(blob_id), *parts)
            self._keep_hashes(blob_id, size_bytes, hashes)
        return blob_id

    def adopt_file(self, temp_file: Path) -> str:
        """Take over `temp_file`: hash it, sync it, rename it in. Doing so twice is harmless.

        The caller gives the file away and must not write to it again. Cost: one read of the file;
        one copy where it is on another file system.

        Returns:
            Its blob id.

        Raises:
            BlobStoreFullError: There is no room for the copy; `temp_file` is still there.
            ValueError: The file is larger than MAX_BLOB_BYTES.
        """
        hashes = hash_chunks(temp_file)
        size_bytes = temp_file.stat().st_size
        if size_bytes > MAX_BLOB_BYTES:
            raise ValueError(f"{temp_file} has {size_bytes} bytes, more than a blob may have")
        blob_id = blob_id_of(size_bytes, hashes)
        if self.has(blob_id):
            temp_file.unlink()
            return blob_id
        self._move_in(temp_file, self.file_of(blob_id))
        self._keep_hashes(blob_id, size_bytes, hashes)
        return blob_id

    def read_chunk(self, blob_id: str, index: int) -> bytes:
        """Read chunk `index`, checked against its hash, so that a damaged disk is not passed on.

        Raises:
            BlobUnavailableError: The blob is not here, or has no such chunk.
            BlobCorruptError: The file does not hold what the id stands for.
        """
        hashes = self.chunk_hashes(blob_id)
        if not 0 <= index < len(hashes):
            raise BlobUnavailableError(f"blob {blob_id} has no chunk {index}")
        try:
            with self.file_of(blob_id).open("rb") as stream:
                stream.seek(index * CHUNK_BYTES)
                chunk = stream.read(CHUNK_BYTES)
        except FileNotFoundError as error:  # deleted since its hashes were read
            raise BlobUnavailableError(f"blob {blob_id} is not in {self.directory}") from error
        if chunk_hash(chunk) != hashes[index]:
            raise BlobCorruptError(f"chunk {index} of blob {blob_id} is damaged on the disk")
        return chunk

    def read_cached_chunk(self, blob_id: str, index: int) -> bytearray | None:
        """Do what `read_chunk` does where nothing has to be waited for, otherwise return None.

        That is where the system has the chunk in memory and this store knows its hash. So an event
        loop may call it: a thread costs more than the work.

        Cost: a quarter of a millisecond.
        """
        hashes = self._known_hashes.get(blob_id, ())
        if not 0 <= index < len(hashes):
            return None
        chunk = read_cached(self.file_of(blob_id), index * CHUNK_BYTES, CHUNK_BYTES)
        return chunk if chunk is not None and chunk_hash(chunk) == hashes[index] else None

    def chunk_hashes(self, blob_id: str) -> tuple[bytes, ...]:
        """Give the hashes of the blob's chunks, 32 bytes each.

        Cost: reads the side file; the whole blob only where that is missing or wrong.

        Raises:
            BlobUnavailableError: The blob is not here.
            BlobCorruptError: The file does not hold what the id stands for.
        """
        size_bytes = self.size_bytes(blob_id)
        # Invariant: what is in here was checked against the id, so it is right whatever happens to
        # the files.
        known = self._known_hashes.get(blob_id)
        if known is not None:
            return known
        stored = self._read_hashes(blob_id)
        hashes = hash_chunks(self.file_of(blob_id)) if stored is None else stored[1]
        if stored is None:
            if not fits_id(blob_id, size_bytes, hashes):
                raise BlobCorruptError(f"blob {blob_id} is damaged on the disk")
            self._keep_hashes(blob_id, size_bytes, hashes)
        while len(self._known_hashes) >= MAX_KNOWN_HASHES:
            self._known_hashes.pop(next(iter(self._known_hashes)), None)
        self._known_hashes[blob_id] = hashes
        return hashes

    def verify(self, blob_id: str) -> bool:
        """Tell whether the blob is here and whole. Cost: one read of it."""
        try:
            return blob_id_of_file(self.file_of(blob_id)) == blob_id
        except FileNotFoundError:
            return False

    def delete(self, blob_id: str) -> None:
        """Remove the blob and any download of it in progress; absent is fine."""
        file = self.file_of(blob_id)
        for name in (file, self._partial_file(blob_id), self._hashes_file(blob_id)):
            name.unlink(missing_ok=True)

    def open_partial(self, blob_id: str, size_bytes: int, hashes: tuple[bytes, ...]) -> PartialBlob:
        """Begin a download, or go on with one that a crash or a deadline ended.

        What is already there counts only as far as each chunk hashes to what `hashes` says.

        Raises:
            BlobCorruptError: Size and hashes are not those of `blob_id`.
            BlobStoreFullError: There is no room for the rest of it.
        """
        if not fits_id(blob_id, size_bytes, hashes):
            raise BlobCorruptError(f"the manifest is not the one of blob {blob_id}")
        if self._read_hashes(blob_id) is None:
            self._write_hashes(blob_id, size_bytes, hashes)
        with _full_disk_is_typed(self.directory):
            return PartialBlob(self._partial_file(blob_id), size_bytes, hashes)

    def resume_partial(self, blob_id: str) -> PartialBlob | None:
        """Go on with a download whose manifest is on disk, or None where there is none.

        Raises:
            BlobStoreFullError: There is no room for the rest of it.
        """
        if not self._partial_file(blob_id).is_file():
            return None
        stored = self._read_hashes(blob_id)
        return None if stored is None else self.open_partial(blob_id, *stored)

    def write_partial_chunks(
        self, partial: PartialBlob, chunks: Mapping[int, bytes | bytearray]
    ) -> None:
        """Write chunks, which `partial` has verified.

        Raises:
            BlobStoreFullError: There is no room.
        """
        with _full_disk_is_typed(self.directory):
            for index, chunk in chunks.items():
                partial.write_chunk(index, chunk)

    def finish_partial(self, blob_id: str, partial: PartialBlob) -> None:
        """Give a complete download its name: sync, rename, sync the folder."""
        with _full_disk_is_typed(self.directory):
            partial.close_synced()
            partial.file.replace(self.file_of(blob_id))
            fsync_dir(self.directory)

    def remove_abandoned(self, keep: Collection[str], *, untouched_since: float) -> None:
        """Delete what is left of downloads that nobody goes on with, and of blobs long deleted.

        Args:
            keep: ids that are still wanted.
            untouched_since: instant (as in st_mtime); younger files are left alone.
        """
        for file in (*self.directory.glob("*.partial*"), *self.directory.glob("*.hashes")):
            blob_id = file.name.partition(".")[0]
            if blob_id in keep or (file.suffix == ".hashes" and self.has(blob_id)):
                continue
            with contextlib.suppress(FileNotFoundError):
                if file.stat().st_mtime < untouched_since:
                    file.unlink()

    def _hashes_file(self, blob_id: str) -> Path:
        return self.file_of(blob_id).with_name(blob_id + _HASHES_SUFFIX)

    def _partial_file(self, blob_id: str) -> Path:
        return self.file_of(blob_id).with_name(blob_id + _PARTIAL_SUFFIX)

    def _read_hashes(self, blob_id: str) -> tuple[int, tuple[bytes, ...]] | None:
        """Read the side file, or None where it is missing or not the one of `blob_id`."""
        try:
            size_bytes, hashes = parse_manifest(self._hashes_file(blob_id).read_bytes())
        except (FileNotFoundError, FramingError):
            return None
        return (size_bytes, hashes) if fits_id(blob_id, size_bytes, hashes) else None

    def _keep_hashes(self, blob_id: str, size_bytes: int, hashes: tuple[bytes, ...]) -> None:
        """Spare the next process the hashing, if there is room for that."""
        with contextlib.suppress(BlobStoreFullError):
            self._write_hashes(blob_id, size_bytes, hashes)

    def _write_hashes(self, blob_id: str, size_bytes: int, hashes: tuple[bytes, ...]) -> None:
        with self._temp_file() as temp_file:
            temp_file.write_bytes(encode_manifest(size_bytes, hashes))
            temp_file.replace(self._hashes_file(blob_id))

    def _write_file(self, file: Path, *parts: bytes | memoryview) -> None:
        with self._temp_file() as temp_file:
            with temp_file.open("xb") as stream:
                for part in parts:
                    stream.write(part)
                _sync(stream)
            temp_file.replace(file)
        fsync_dir(self.directory)

    def _move_in(self, temp_file: Path, file: Path) -> None:
        with temp_file.open("r+b") as stream:  # Windows syncs only what is open for writing
            _sync(stream)
        try:
            temp_file.replace(file)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            self._copy_in(temp_file, file)
        fsync_dir(self.directory)

    def _copy_in(self, source_file: Path, file: Path) -> None:
        with self._temp_file() as temp_file:
            with source_file.open("rb") as source, temp_file.open("xb") as stream:
                shutil.copyfileobj(source, stream, CHUNK_BYTES)
                _sync(stream)
            temp_file.replace(file)
        source_file.unlink()

    @contextlib.contextmanager
    def _temp_file(self) -> Iterator[Path]:
        """Name a temporary file; whatever happens, none is left under that name."""
        temp_file = self.directory / f"{_TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        try:
            with _full_disk_is_typed(self.directory):
                yield temp_file
        finally:
            temp_file.unlink(missing_ok=True)

    def _remove_stale_temp_files(self) -> None:
        """Remove temporary files whose writer is gone; another process may be writing now."""
        for file in self.directory.glob(f"{_TEMP_PREFIX}*"):
            pid_text = file.name.removeprefix(_TEMP_PREFIX).split("-")[0]
            if not pid_text.isdigit() or not psutil.pid_exists(int(pid_text)):
                file.unlink(missing_ok=True)
