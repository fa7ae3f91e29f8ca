"""How many chunks may be on their way to us at a time. Runs in: agent.

All downloads share the places: without a bound, thirty blobs from eight peers each would cut a home
line into shares so small that libp2p gives their streams up (a frame of 64 KiB in 5 s).
"""

from __future__ import annotations

from typing import Final

import trio

from p2p.blob_hashes import CHUNK_BYTES
from p2p.flow import LOOK_EVERY_S, Flow, Priority

MAX_ASKED: Final = 32  # chunks, so 32 MiB of memory
MAX_BULK_ASKED: Final = 16  # of those
CHUNK_BYTES_PER_S: Final = 64 << 10  # that a limit must leave for each chunk on its way


class ChunkLane:
    """The places of the chunks of one priority."""

    def __init__(self, flow: Flow, priority: Priority, shared: trio.Semaphore, most: int) -> None:
        self._flow = flow
        self._priority = priority
        self._semaphores = (trio.Semaphore(most), shared)

    def enter_nowait(self) -> bool:
        """Take a place for one chunk, or tell that there is none now."""
        taken: list[trio.Semaphore] = []
        try:
            for semaphore in self._semaphores:
                semaphore.acquire_nowait()
                taken.append(semaphore)
        except trio.WouldBlock:
            pass
        else:
            if self._flow.may_ask(CHUNK_BYTES, self._priority):
                return True
        for semaphore in taken:
            semaphore.release()
        return False

    async def enter(self) -> None:
        """Wait for a place, and take it."""
        while not self.enter_nowait():  # noqa: ASYNC110 -- what it waits for has three causes
            await trio.sleep(LOOK_EVERY_S)  # noqa: TID251 -- see above

    def leave(self) -> None:
        """Give a place back."""
        for semaphore in self._semaphores:
            semaphore.release()


def make_lanes(flow: Flow) -> dict[Priority, ChunkLane]:
    """Make the lanes of one swarm: bulk takes at most half of all places."""
    most = flow.download.share_of(CHUNK_BYTES_PER_S, MAX_ASKED)
    shared = trio.Semaphore(most)
    bulk = max(1, min(most // 2, MAX_BULK_ASKED))
    return {
        Priority.URGENT: ChunkLane(flow, Priority.URGENT, shared, most),
        Priority.BULK: ChunkLane(flow, Priority.BULK, shared, bulk),
    }
