"""The part of the swarm that gives and fetches blobs. Runs in: agent. PROTOCOL.md section 4."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import trio

from p2p.blob_fetch import BlobFetcher
from p2p.blobs import BlobServer
from p2p.blobstore import BlobStore, is_blob_id
from p2p.fetch_terms import Connect, NoteMisdeed
from p2p.flow import Flow, Priority
from p2p.host import Host
from p2p.swarm_types import DownloadView, Tally


class BlobExchange(ABC):
    """What Swarm does with blobs."""

    _nursery: trio.Nursery  # set by open_swarm

    def __init__(
        self,
        peer_id: str,
        tally: Tally,
        flow: Flow,
        connect: Connect,
        note_misdeed: NoteMisdeed,
    ) -> None:
        self.peer_id = peer_id
        """Our own peer id."""
        self._flow = flow
        self._blob_server = BlobServer(tally, flow)
        self._blob_fetcher = BlobFetcher(connect, tally, flow, note_misdeed)

    @property
    @abstractmethod
    def _host(self) -> Host | None:
        """The host that is up; None in between."""

    def serve_blobs(
        self,
        store: BlobStore,
        may_serve: Callable[[str], bool],
        purpose_of: Callable[[str], str],
        priority_of: Callable[[str], Priority] = lambda _blob_id: Priority.URGENT,
    ) -> None:
        """Give peers the blobs in `store` that `may_serve` allows, under `purpose_of(blob_id)`.

        While urgent ones are given or fetched, bulk ones get little of the line.
        """
        self._blob_server.serve(self._host, store, may_serve, purpose_of, priority_of)

    async def fetch_blob(
        self,
        blob_id: str,
        *,
        max_bytes: int,
        providers: Callable[[], Sequence[str]],
        store: BlobStore,
        purpose: str,
        deadline_s: float,
        stall_s: float = math.inf,
        gone_s: float = math.inf,
        priority: Priority = Priority.URGENT,
    ) -> None:
        """Bring a blob into `store`; done at once where it is there.

        Args:
            blob_id: Which.
            max_bytes: Larger ones are refused, before anything but their size is fetched.
            providers: Who may have it; asked again while waiting, since new holders appear.
            store: Where it goes; what has arrived stays there for the next try.
            purpose: What the bytes are accounted under.
            deadline_s: Seconds from now after which it is given up.
            stall_s: Seconds without a new chunk after which it is.
            gone_s: The same while every provider says that it does not have it.
            priority: Bulk yields to urgent fetches, and what is served in bulk does too.

        Raises:
            BlobUnavailableError: The deadline passed, the blob is too large, or the disk failed.
            BlobStoreFullError: There is no room on the disk.

        Cancellation: what has arrived stays; a download shared with another caller goes on.
        """
        if not is_blob_id(blob_id):
            raise ValueError(f"{blob_id!r} is no blob id")
        await self._blob_fetcher.fetch(
            self._nursery,
            blob_id,
            max_bytes=max_bytes,
            providers=lambda: [peer for peer in providers() if peer != self.peer_id],
            store=store,
            purpose=purpose,
            deadline_s=deadline_s,
            stall_s=stall_s,
            gone_s=gone_s,
            priority=priority,
        )

    def downloads(self) -> tuple[DownloadView, ...]:
        """List the blobs that are being fetched."""
        return self._blob_fetcher.downloads()
