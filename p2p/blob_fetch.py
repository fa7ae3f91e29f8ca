"""Fetching a blob from several peers at once. Runs in: agent.

The manifest is checked against the id, every chunk against the manifest, so a lie is noticed within
one chunk and its teller is not asked again. A peer that is silent or gone is left alone for a while
that doubles. What has arrived stays on disk whatever happens, and the next try goes on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from p2p.blobs import BLOB_PROTOCOL, BlobClient
from p2p.blobstore import BlobStore
from p2p.contain import contain
from p2p.errors import (
    BlobCorruptError,
    BlobStoreFullError,
    BlobUnavailableError,
    FramingError,
    P2PError,
    PeerUnreachableError,
    RequestRefusedError,
    RequestTimeoutError,
)
from p2p.framing import BlobOp
from p2p.host import Host
from p2p.partial_blob import PartialBlob
from p2p.swarm_types import Tally

WINDOW: Final = 4  # chunks asked for ahead from one peer: 4 MiB hide 0.1 s at 40 MB/s
MAX_PROVIDERS: Final = 8  # asked at once
REASK_EVERY_S: Final = 0.5  # how often providers() is asked while waiting
SECOND_ASK_AFTER_S: Final = (
    2.0  # a chunk is asked for elsewhere too when all others are on their way
)
STREAM_TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 1.0  # before a peer that failed is asked again; doubles
MAX_PAUSE_S: Final = 30.0

Providers = Callable[[], Sequence[str]]
Connect = Callable[[str], Awaitable[Host]]

_PEER_FAILED: Final = (
    PeerUnreachableError,
    RequestRefusedError,
    RequestTimeoutError,
    FramingError,
    trio.TooSlowError,
)


@dataclass(slots=True)
class _InFlight:
    """A chunk that was asked for."""

    asked_at: float
    peers: set[str] = field(default_factory=set)


class _Download:
    """One blob on its way; those who fetch it at the same time share it."""

    def __init__(
        self,
        blob_id: str,
        store: BlobStore,
        connect: Connect,
        tally: Tally,
        *,
        purpose: str,
        max_bytes: int,
    ) -> None:
        self.blob_id = blob_id
        self.max_bytes = max_bytes
        self.providers: list[Providers] = []
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.error: P2PError | None = None
        self._store = store
        self._connect = connect
        self._tally = tally
        self._purpose = purpose
        self._partial: PartialBlob | None = None
        self._todo: deque[int] = deque()
        self._in_flight: dict[int, _InFlight] = {}
        self._disk = trio.Lock()
        self._complete = trio.Event()
        self._changed = trio.Event()
        self._workers: set[str] = set()
        self._liars: set[str] = set()
        self._failures: dict[str, int] = {}
        self._ask_again_at: dict[str, float] = {}

    async def run(self) -> None:
        """Download until the blob is whole, an error ends it, or the scope is cancelled."""
        try:
            with contain(f"download of blob {self.blob_id}") as outcome, self.scope:
                await self._run()
            if outcome.error is not None and self.error is None:
                self.error = BlobUnavailableError(
                    f"blob {self.blob_id} could not be kept: {outcome.error!r}"
                )
        finally:
            if self._partial is not None:
                self._partial.close()
            self.ended.set()

    async def _run(self) -> None:
        resumed = await trio.to_thread.run_sync(self._store.resume_partial, self.blob_id)
        if resumed is not None:
            self._begin(resumed)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._start_workers, nursery)
            await self._complete.wait()
            nursery.cancel_scope.cancel()
        if self.error is not None:
            return
        assert self._partial is not None, "Invariant: complete without an error means a whole file"
        await trio.to_thread.run_sync(self._store.finish_partial, self.blob_id, self._partial)

    def _begin(self, partial: PartialBlob) -> None:
        self._partial = partial
        if partial.size_bytes > self.max_bytes:
            self._fail(
                BlobUnavailableError(
                    f"blob {self.blob_id} has {partial.size_bytes} bytes, too many"
                )
            )
        self._todo.extend(sorted(partial.missing))
        if not partial.missing:
            self._complete.set()

    def _fail(self, error: P2PError) -> None:
        self.error = error
        self._complete.set()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # -- whom to ask

    async def _start_workers(self, nursery: trio.Nursery) -> None:
        while True:
            now = trio.current_time()
            for peer_id in self._candidates():
                is_due = self._ask_again_at.get(peer_id, 0.0) <= now
                if is_due and peer_id not in self._workers and len(self._workers) < MAX_PROVIDERS:
                    self._workers.add(peer_id)
                    nursery.start_soon(self._work, peer_id)
            with trio.move_on_after(REASK_EVERY_S):
                await self._changed.wait()

    def _candidates(self) -> list[str]:
        found: dict[str, None] = {}
        for providers in list(self.providers):
            with contain("providers") as outcome:
                found.update(dict.fromkeys(providers()))
            self._tally.failed_handlers += outcome.error is not None
        return [peer_id for peer_id in found if peer_id not in self._liars]

    async def _work(self, peer_id: str) -> None:
        """Ask one peer until the blob is whole or the peer fails."""
        try:
            await self._fetch_from(peer_id)
        except BlobCorruptError:
            self._tally.bad_chunks += 1
            self._liars.add(peer_id)
        except BlobStoreFullError as error:
            self._fail(error)
        except _PEER_FAILED:
            failures = self._failures[peer_id] = self._failures.get(peer_id, 0) + 1
            pause_s = min(MAX_PAUSE_S, PAUSE_S * 2 ** (failures - 1))
            self._ask_again_at[peer_id] = trio.current_time() + pause_s
        finally:
            self._workers.discard(peer_id)
            self._notify()

    async def _fetch_from(self, peer_id: str) -> None:
        host = await self._connect(peer_id)
        async with host.open_stream(peer_id, BLOB_PROTOCOL, timeout_s=STREAM_TIMEOUT_S) as stream:
            client = BlobClient(stream, self.blob_id)
            if self._partial is None:
                await self._fetch_manifest(client)
            await self._fetch_chunks(peer_id, client)

    async def _fetch_manifest(self, client: BlobClient) -> None:
        await client.ask(BlobOp.MANIFEST)
        size_bytes, hashes = await client.read_manifest(self.max_bytes)
        self._tally.received[self._purpose] += 8 + sum(map(len, hashes))
        async with self._disk:
            if self._partial is None:  # another peer may have been faster
                self._begin(
                    await trio.to_thread.run_sync(
                        self._store.open_partial, self.blob_id, size_bytes, hashes
                    )
                )

    # -- chunks

    async def _fetch_chunks(self, peer_id: str, client: BlobClient) -> None:
        partial = self._partial
        assert partial is not None, "Invariant: the manifest comes first"
        asked: deque[int] = deque()
        try:
            while not self._complete.is_set():
                while len(asked) < WINDOW and (index := self._take(peer_id)) is not None:
                    asked.append(index)
                    await client.ask(BlobOp.CHUNK, index)
                if not asked:
                    await self._wait_for_work()
                    continue
                chunk = await client.read_chunk(partial.size_bytes, asked[0])
                await self._keep(partial, asked[0], chunk)
                self._failures.pop(peer_id, None)
                self._in_flight.pop(asked.popleft(), None)
        finally:
            for index in asked:
                self._give_back(peer_id, index)

    def _take(self, peer_id: str) -> int | None:
        """Choose what to ask `peer_id` for: a new chunk, else one that others are slow with."""
        now = trio.current_time()
        if self._todo:
            index = self._todo.popleft()
            self._in_flight[index] = _InFlight(now, {peer_id})
            return index
        for index, flight in self._in_flight.items():
            if peer_id not in flight.peers and now - flight.asked_at > SECOND_ASK_AFTER_S:
                flight.asked_at = now
                flight.peers.add(peer_id)
                return index
        return None

    def _give_back(self, peer_id: str, index: int) -> None:
        flight = self._in_flight.get(index)
        if flight is None:
            return  # another peer delivered it
        flight.peers.discard(peer_id)
        if not flight.peers:
            del self._in_flight[index]
            self._todo.appendleft(index)
            self._notify()

    async def _wait_for_work(self) -> None:
        with trio.move_on_after(SECOND_ASK_AFTER_S / 2):
            await self._changed.wait()

    async def _keep(self, partial: PartialBlob, index: int, chunk: bytes) -> None:
        self._tally.received[self._purpose] += len(chunk)
        async with self._disk:
            if index in partial.missing:
                await trio.to_thread.run_sync(
                    self._store.write_partial_chunk, partial, index, chunk
                )
        if not partial.missing:
            self._complete.set()


class BlobFetcher:
    """The downloads of one swarm."""

    def __init__(self, connect: Connect, tally: Tally) -> None:
        self._connect = connect
        self._tally = tally
        self._downloads: dict[tuple[Path, str], _Download] = {}

    async def fetch(
        self,
        nursery: trio.Nursery,
        blob_id: str,
        *,
        max_bytes: int,
        providers: Providers,
        store: BlobStore,
        purpose: str,
        deadline_s: float,
    ) -> None:
        """Bring a blob into `store`; see Swarm.fetch_blob."""
        with trio.move_on_after(deadline_s):
            while not store.has(blob_id):
                await self._take_part(nursery, blob_id, providers, store, purpose, max_bytes)
        if not store.has(blob_id):
            raise BlobUnavailableError(f"nobody delivered blob {blob_id} within {deadline_s:g} s")
        if store.size_bytes(blob_id) > max_bytes:
            raise BlobUnavailableError(f"blob {blob_id} has more than {max_bytes} bytes")

    async def _take_part(
        self,
        nursery: trio.Nursery,
        blob_id: str,
        providers: Providers,
        store: BlobStore,
        purpose: str,
        max_bytes: int,
    ) -> None:
        """Join the download of the blob or begin it; the last one to leave ends it."""
        key = (store.directory, blob_id)
        download = self._downloads.get(key)
        if download is not None and (
            download.scope.cancel_called or download.max_bytes < max_bytes
        ):
            await download.ended.wait()
            return
        if download is None:
            download = self._downloads[key] = _Download(
                blob_id, store, self._connect, self._tally, purpose=purpose, max_bytes=max_bytes
            )
            nursery.start_soon(self._run, key, download)
        download.providers.append(providers)
        try:
            await download.ended.wait()
        finally:
            download.providers.remove(providers)
            if not download.providers:
                download.scope.cancel()
        if download.error is not None:
            raise type(download.error)(str(download.error), hint=download.error.hint)

    async def _run(self, key: tuple[Path, str], download: _Download) -> None:
        try:
            await download.run()
        finally:
            del self._downloads[key]
