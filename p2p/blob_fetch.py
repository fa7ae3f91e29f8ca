"""Fetching a blob from several peers at once. Runs in: agent.

The manifest is checked against the id, every chunk against the manifest, so a lie is noticed within
one chunk and its teller is not asked again for that blob; nor is who breaks the protocol's lengths.
A peer that is silent or gone is left alone for a while that doubles. What has arrived stays on disk
(after a kill -9 all but the last few chunks: chunk_writer.py); the next try goes on from there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import trio

from p2p.blobs import BLOB_PROTOCOL, BlobClient
from p2p.blobstore import BlobStore
from p2p.chunk_lanes import ChunkLane, make_lanes
from p2p.chunk_plan import SECOND_ASK_AFTER_S, ChunkPlan
from p2p.chunk_writer import ChunkWriter
from p2p.conduct import Misdeed
from p2p.contain import contain
from p2p.errors import (
    BlobCorruptError,
    BlobNotServedError,
    BlobStoreFullError,
    BlobUnavailableError,
    FramingError,
    P2PError,
    PeerUnreachableError,
    RequestRefusedError,
    RequestTimeoutError,
    StreamEndedError,
)
from p2p.fetch_terms import Connect, NoteMisdeed, Providers, Terms
from p2p.flow import Flow, Priority
from p2p.partial_blob import PartialBlob
from p2p.speed import Speed
from p2p.swarm_types import DownloadView, Tally

WINDOW: Final = 4  # chunks asked for ahead from one peer: 4 MiB hide 0.1 s at 40 MB/s
ASK_AGAIN_AT: Final = 2  # of those left: two are asked for with one message
AHEAD_BYTES: Final = 2 << 20  # let through at once; it grows from there, as the line allows
MAX_PROVIDERS: Final = 8  # asked at once
REASK_EVERY_S: Final = 0.5  # how often providers() is asked while waiting
STREAM_TIMEOUT_S: Final = 10.0
PAUSE_S: Final = 1.0  # before a peer that failed is asked again; doubles
MAX_PAUSE_S: Final = 30.0

_PEER_FAILED: Final = (
    PeerUnreachableError,
    RequestRefusedError,
    RequestTimeoutError,
    StreamEndedError,
    trio.TooSlowError,
)


class _Download:
    """One blob on its way; those who fetch it at the same time share it."""

    def __init__(
        self,
        blob_id: str,
        terms: Terms,
        store: BlobStore,
        connect: Connect,
        tally: Tally,
        flow: Flow,
        lane: ChunkLane,
        note_misdeed: NoteMisdeed,
    ) -> None:
        self.blob_id = blob_id
        self.terms = terms
        self.providers: list[Providers] = []
        self.scope = trio.CancelScope()
        self.ended = trio.Event()
        self.error: P2PError | None = None
        self._store = store
        self._connect = connect
        self._tally = tally
        self._flow = flow
        self._lane = lane
        self._note_misdeed = note_misdeed
        self._progress_at = trio.current_time()
        self._speed = Speed(self._progress_at)
        self._partial: PartialBlob | None = None
        self._plan = ChunkPlan(())
        self._writer: ChunkWriter | None = None
        self._opening = trio.Lock()
        self._complete = trio.Event()
        self._changed = trio.Event()
        self._workers: set[str] = set()
        self._liars: set[str] = set()
        self._lacking: set[str] = set()
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
            if self._writer is not None:
                await self._writer.close()
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

    def view(self) -> DownloadView:
        """Say how far it is."""
        partial, now = self._partial, trio.current_time()
        return DownloadView(
            blob_id=self.blob_id,
            size_bytes=None if partial is None else partial.size_bytes,
            held_bytes=0 if partial is None else partial.held_bytes(),
            bytes_per_s=self._speed.bytes_per_s(now),
            num_peers=len(self._workers),
        )

    def _begin(self, partial: PartialBlob) -> None:
        self._writer = ChunkWriter(self._store, partial, self.terms.priority)
        self._partial = partial
        self._progress_at = trio.current_time()  # hashing what was there may have taken a while
        if partial.size_bytes > self.terms.max_bytes:
            self._fail(
                BlobUnavailableError(
                    f"blob {self.blob_id} has {partial.size_bytes} bytes, too many"
                )
            )
        self._plan = ChunkPlan(sorted(partial.missing))
        if not partial.missing:
            self._complete.set()

    def _fail(self, error: P2PError) -> None:
        self.error = error
        self._complete.set()

    def notify(self) -> None:
        """Have it look at once whom to ask, and for what."""
        self._changed.set()
        self._changed = trio.Event()

    # -- whom to ask

    async def _start_workers(self, nursery: trio.Nursery) -> None:
        while True:
            await self._write_old()
            now = trio.current_time()
            candidates = self._candidates()
            self._give_up_if_hopeless(candidates, now)
            for peer_id in candidates:
                is_due = self._ask_again_at.get(peer_id, 0.0) <= now
                if is_due and peer_id not in self._workers and len(self._workers) < MAX_PROVIDERS:
                    self._workers.add(peer_id)
                    nursery.start_soon(self._work, peer_id)
            with trio.move_on_after(REASK_EVERY_S):
                await self._changed.wait()

    def _give_up_if_hopeless(self, candidates: Sequence[str], now: float) -> None:
        stalled_s = now - self._progress_at
        reason = ""
        if stalled_s > self.terms.stall_s:
            reason = f"nobody gave a chunk of blob {self.blob_id} for {stalled_s:.0f} s"
        elif candidates and stalled_s > self.terms.gone_s and self._lacking.issuperset(candidates):
            reason = f"none of {len(candidates)} peers has blob {self.blob_id}"
        if reason:
            self._fail(BlobUnavailableError(reason))

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
            self._note_misdeed(peer_id, Misdeed.WRONG_CHUNK)
        except BlobStoreFullError as error:
            self._fail(error)
        except _PEER_FAILED as error:
            if isinstance(error, BlobNotServedError):
                self._lacking.add(peer_id)
            failures = self._failures[peer_id] = self._failures.get(peer_id, 0) + 1
            pause_s = min(MAX_PAUSE_S, PAUSE_S * 2 ** (failures - 1))
            self._ask_again_at[peer_id] = trio.current_time() + pause_s
        except FramingError:  # but for a stream that ended, which is above
            self._liars.add(peer_id)
            self._note_misdeed(peer_id, Misdeed.MALFORMED)
        finally:
            self._workers.discard(peer_id)
            self.notify()

    async def _fetch_from(self, peer_id: str) -> None:
        host = await self._connect(peer_id)
        async with host.open_stream(peer_id, BLOB_PROTOCOL, timeout_s=STREAM_TIMEOUT_S) as stream:
            client = BlobClient(stream, self.blob_id, self._note_bytes)
            await client.expect(AHEAD_BYTES)
            if self._partial is None:
                await self._fetch_manifest(client)
            await self._fetch_chunks(peer_id, client)

    def _note_bytes(self, num_bytes: int) -> None:
        self._speed.note(num_bytes, trio.current_time())
        self._flow.note_fetched(num_bytes, self.terms.priority)

    async def _fetch_manifest(self, client: BlobClient) -> None:
        await client.ask_manifest()
        size_bytes, hashes = await client.read_manifest(self.terms.max_bytes)
        self._tally.received[self.terms.purpose] += 8 + sum(map(len, hashes))
        async with self._opening:
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
                await self._ask_ahead(peer_id, client, asked)
                if not asked:
                    await self._wait_for_work()
                    continue
                chunk = await client.read_chunk(partial.size_bytes, asked[0])
                await self._keep(partial, asked[0], chunk)
                self._failures.pop(peer_id, None)
                self._lacking.discard(peer_id)
                self._plan.end(asked.popleft())
                self._lane.leave()
        finally:
            for index in asked:
                if self._plan.give_back(peer_id, index):
                    self.notify()
                self._lane.leave()

    async def _ask_ahead(self, peer_id: str, client: BlobClient, asked: deque[int]) -> None:
        """Ask for what the window and the lane have room for; wait for room only if for none."""
        if len(asked) > ASK_AGAIN_AT:
            return
        num_asked = len(asked)
        while len(asked) < WINDOW and self._plan.has_work_for(peer_id, trio.current_time()):
            if not self._lane.enter_nowait():
                if asked:
                    break
                await self._lane.enter()
            index = self._plan.take(peer_id, trio.current_time())
            if index is None:
                self._lane.leave()
                break
            asked.append(index)
        await client.ask_chunks(list(asked)[num_asked:])

    async def _wait_for_work(self) -> None:
        with trio.move_on_after(SECOND_ASK_AFTER_S / 2):
            await self._changed.wait()

    async def _write_old(self) -> None:
        """Keep what came before everybody fell silent."""
        try:
            if self._writer is not None:
                await self._writer.write_old()
        except BlobStoreFullError as error:
            self._fail(error)

    async def _keep(self, partial: PartialBlob, index: int, chunk: bytearray) -> None:
        assert self._writer is not None, "Invariant: it is there with the partial blob"
        self._tally.received[self.terms.purpose] += len(chunk)
        if await self._writer.keep(index, chunk):
            self._progress_at = trio.current_time()
        if not partial.missing:
            self._complete.set()


class BlobFetcher:
    """The downloads of one swarm."""

    def __init__(
        self, connect: Connect, tally: Tally, flow: Flow, note_misdeed: NoteMisdeed
    ) -> None:
        self._connect = connect
        self._tally = tally
        self._flow = flow
        self._lanes = make_lanes(flow)
        self._note_misdeed = note_misdeed
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
        stall_s: float,
        gone_s: float,
        priority: Priority,
    ) -> None:
        """Bring a blob into `store`; see Swarm.fetch_blob."""
        terms = Terms(
            purpose=purpose,
            max_bytes=max_bytes,
            stall_s=stall_s,
            gone_s=gone_s,
            priority=priority,
        )
        with trio.move_on_after(deadline_s):
            while not store.has(blob_id):
                await self._take_part(nursery, blob_id, providers, store, terms)
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
        terms: Terms,
    ) -> None:
        """Join the download of the blob or begin it; the last one to leave ends it."""
        key = (store.directory, blob_id)
        download = self._downloads.get(key)
        if download is not None and (
            download.scope.cancel_called or download.terms.max_bytes < terms.max_bytes
        ):
            await download.ended.wait()
            return
        if download is None:
            download = self._downloads[key] = _Download(
                blob_id,
                terms,
                store,
                self._connect,
                self._tally,
                self._flow,
                self._lanes[terms.priority],
                self._note_misdeed,
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

    def note_provider(self) -> None:
        """Have every download see at once who may have come."""
        for download in self._downloads.values():
            download.notify()

    def downloads(self) -> tuple[DownloadView, ...]:
        """List the blobs on their way."""
        return tuple(download.view() for download in self._downloads.values())

    async def _run(self, key: tuple[Path, str], download: _Download) -> None:
        try:
            await download.run()
        finally:
            del self._downloads[key]
