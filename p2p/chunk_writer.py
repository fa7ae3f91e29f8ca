"""Chunks of a download on their way to the disk. Runs in: agent.

A thread costs more than to write one chunk, so a few are written together. What comes slowly is
written at once: a download that is killed loses what came within half a second. Of bulk, which may
take an hour, all below 50 chunks a second is slow: each is written before the next has come.
"""

from __future__ import annotations

import math
from typing import Final

import trio

from p2p.blobstore import BlobStore
from p2p.contain import contain
from p2p.flow import Priority
from p2p.partial_blob import PartialBlob

WRITTEN_TOGETHER: Final = 4
WRITE_AFTER_S: Final = {Priority.URGENT: 0.25, Priority.BULK: 0.02}


class ChunkWriter:
    """Writes what was fetched of one blob."""

    def __init__(self, store: BlobStore, partial: PartialBlob, priority: Priority) -> None:
        """Write into `partial`, which `close` closes; `priority` is the download's."""
        self._write_after_s = WRITE_AFTER_S[priority]
        self._store = store
        self._partial = partial
        self._waiting: dict[int, bytearray] = {}
        self._written_at = -math.inf
        self._disk = trio.Lock()

    async def keep(self, index: int, chunk: bytearray) -> bool:
        """Verify a chunk, and write it with others: now, or once there are some.

        Returns:
            Whether it was lacking.

        Raises:
            BlobCorruptError: It is not what the manifest promises.
            BlobStoreFullError: There is no room.
        """
        is_new = index in self._partial.missing and index not in self._waiting
        if is_new:
            self._partial.verify_chunk(index, chunk)
            self._waiting[index] = chunk
        while self._waiting and self._is_due():
            await self._write()
        return is_new

    async def write_old(self) -> None:
        """Write what has waited long enough for others; to be called now and then.

        Raises:
            BlobStoreFullError: There is no room.
        """
        if self._waiting and self._is_due():
            await self._write()

    async def close(self) -> None:
        """Write what is left, for the next try, and close the file, whatever happens."""
        try:
            with trio.CancelScope(shield=True), contain("the rest of a download"):
                await self._write()
        finally:
            self._partial.close()

    def _is_due(self) -> bool:
        return (
            len(self._waiting) >= WRITTEN_TOGETHER
            or trio.current_time() - self._written_at >= self._write_after_s
            or self._partial.missing <= self._waiting.keys()
        )

    async def _write(self) -> None:
        async with self._disk:
            chunks, self._waiting = self._waiting, {}
            if chunks:
                write = self._store.write_partial_chunks
                await trio.to_thread.run_sync(write, self._partial, chunks)
                self._written_at = trio.current_time()
