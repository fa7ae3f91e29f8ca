"""A download in progress: a sparse file that is believed chunk by chunk. Runs in: agent.

No bitmap says what is there: opening hashes what the file holds and believes that alone, so a kill
-9, a torn write or a meddled file costs the chunks concerned and nothing else. (blake3 reads 1 GiB
in about a second, less than fetching one chunk takes on a home line.)
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from p2p.blob_hashes import CHUNK_BYTES, chunk_hash, chunk_size_bytes
from p2p.errors import BlobCorruptError


class PartialBlob:
    """The sparse file of one download, and which chunks it still lacks."""

    def __init__(self, file: Path, size_bytes: int, hashes: tuple[bytes, ...]) -> None:
        """Open or make `file`. Cost: one read of what is there.

        Args:
            file: Where the chunks go; owned by this object until `close`.
            size_bytes: The length of the whole blob.
            hashes: The hash of each chunk; the caller has checked them against the blob id.

        Raises:
            OSError: ENOSPC where the disk has no room for what is missing.
        """
        self.file = file
        self.size_bytes = size_bytes
        self.hashes = hashes
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        try:
            is_new = os.fstat(self._descriptor).st_size == 0
            os.ftruncate(self._descriptor, size_bytes)
            self.missing: set[int] = {
                index for index in range(len(hashes)) if is_new or not self._is_present(index)
            }
            if shutil.disk_usage(file.parent).free < len(self.missing) * CHUNK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        except BaseException:
            self.close()
            raise

    def held_bytes(self) -> int:
        """Count the bytes that are there and checked."""
        size = self.size_bytes
        return size - sum(chunk_size_bytes(size, index) for index in tuple(self.missing))

    def _is_present(self, index: int) -> bool:
        os.lseek(self._descriptor, index * CHUNK_BYTES, os.SEEK_SET)
        chunk = os.read(self._descriptor, chunk_size_bytes(self.size_bytes, index))
        return chunk_hash(chunk) == self.hashes[index]

    def verify_chunk(self, index: int, chunk: bytes | bytearray) -> None:
        """Check that a chunk is what the manifest promises. Cost: 0.1 ms for 1 MiB.

        Raises:
            BlobCorruptError: It is not.
        """
        if not 0 <= index < len(self.hashes) or chunk_hash(chunk) != self.hashes[index]:
            raise BlobCorruptError(f"a chunk is not number {index} of {self.file.stem}")

    def write_chunk(self, index: int, chunk: bytes | bytearray) -> None:
        """Write one chunk, which the caller has verified.

        Raises:
            OSError: ENOSPC where the disk is full.
        """
        os.lseek(self._descriptor, index * CHUNK_BYTES, os.SEEK_SET)
        view = memoryview(chunk)
        while view:
            view = view[os.write(self._descriptor, view) :]
        self.missing.discard(index)

    def close_synced(self) -> None:
        """Sync the file to the disk and close it; every chunk must be there."""
        if self.missing:
            raise ValueError(f"{self.file} still lacks {len(self.missing)} chunks")
        os.fsync(self._descriptor)
        self.close()

    def close(self) -> None:
        """Close the file; what is in it stays for the next try."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def taken_bytes(status: os.stat_result) -> int:
    """Tell what a sparse file takes: its blocks (512 bytes each), not its length."""
    blocks: int | None = getattr(status, "st_blocks", None)
    return status.st_size if blocks is None else min(status.st_size, blocks * 512)
