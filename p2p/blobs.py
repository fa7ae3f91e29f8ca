"""Serving blobs, and the wire of the blob protocol. Runs in: agent. PROTOCOL.md section 4.

A client opens one stream, writes requests of 37 bytes, several ahead, and reads the answers in
order. An answer is written in pieces, each when the flow lets it (p2p/flow.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Final

import trio

from p2p.blob_hashes import chunk_size_bytes, num_chunks_of
from p2p.blobstore import BlobStore
from p2p.errors import (
    BlobCorruptError,
    BlobNotServedError,
    BlobUnavailableError,
    FramingError,
    RequestRefusedError,
    StreamEndedError,
)
from p2p.flow import Flow, Priority
from p2p.framing import (
    BLOB_REQUEST_BYTES,
    HASH_BYTES,
    LENGTH,
    MAX_REASON_BYTES,
    BlobOp,
    BlobRequest,
    Status,
    encode_blob_request,
    encode_manifest,
    encode_refusal,
    parse_blob_request,
    parse_length,
    parse_manifest,
    read_answer_head,
    read_exactly,
    spoken,
)
from p2p.host import Host
from p2p.peer_stream import BATCH_BYTES, WRITE_BYTES, PeerStream
from p2p.swarm_types import Tally

BLOB_PROTOCOL: Final = "/allmende/blob/1"
IDLE_DEADLINE_S: Final = 60.0  # a client that asks for nothing
WRITE_DEADLINE_S: Final = 120.0  # one chunk, less what we hold it up ourselves: 9 KB/s
MAX_SERVED_AT_ONCE: Final = 16  # chunks in memory
MAX_SERVED_PER_PEER: Final = 2  # so that a few slow readers cannot take all of them
MAX_BULK_AT_ONCE: Final = 8  # of those, so that bulk that is held up keeps nobody else waiting
MAX_BULK_PER_PEER: Final = 1
ANSWER_BYTES_PER_S: Final = 32 << 10  # that a limit must leave for each: a client waits 20 s
BUSY_AFTER_S: Final = 5.0  # a request that waits so long for its turn is told to come back
STALL_S: Final = 20.0  # a client waits so long for the next byte


def max_manifest_bytes(max_bytes: int) -> int:
    """Give the length of the manifest of a blob of `max_bytes`."""
    return 8 + HASH_BYTES * num_chunks_of(max_bytes)


_BUSY: Final = encode_refusal(Status.BUSY, "too many ask at once; come back")


class _PeerSlots:
    """The answers that one peer is being given."""

    def __init__(self) -> None:
        self.slots = trio.Semaphore(MAX_SERVED_PER_PEER)
        self.bulk = trio.Semaphore(MAX_BULK_PER_PEER)
        self.num_users = 0


class BlobServer:
    """Gives this volunteer's blobs to peers."""

    def __init__(self, tally: Tally, flow: Flow) -> None:
        self._tally = tally
        self._flow = flow
        self._store: BlobStore | None = None
        self._may_serve: Callable[[str], bool] = lambda _blob_id: False
        self._purpose_of: Callable[[str], str] = lambda _blob_id: "blob"
        self._priority_of: Callable[[str], Priority] = lambda _blob_id: Priority.URGENT
        most = flow.upload.share_of(ANSWER_BYTES_PER_S, MAX_SERVED_AT_ONCE)
        self._slots = trio.Semaphore(most)
        self._bulk = trio.Semaphore(max(1, min(most // 2, MAX_BULK_AT_ONCE)))
        self._peers: dict[str, _PeerSlots] = {}
        self._disk = trio.CapacityLimiter(2)

    def serve(
        self,
        host: Host | None,
        store: BlobStore,
        may_serve: Callable[[str], bool],
        purpose_of: Callable[[str], str],
        priority_of: Callable[[str], Priority],
    ) -> None:
        """Serve the blobs in `store` that `may_serve` allows, now and on hosts to come."""
        self._store, self._may_serve, self._purpose_of = store, may_serve, purpose_of
        self._priority_of = priority_of
        if host is not None:
            self.attach(host)

    def attach(self, host: Host) -> None:
        """Answer the blob protocol on a new host."""
        if self._store is not None:
            host.set_handler(BLOB_PROTOCOL, self._answer_all)

    async def _answer_all(self, _peer_id: str, stream: PeerStream) -> None:
        while True:
            first = b""
            with trio.move_on_after(IDLE_DEADLINE_S):
                first = await stream.read_some(BLOB_REQUEST_BYTES)
            if not first:
                return  # it has closed the stream, or asks for nothing more
            with trio.fail_after(IDLE_DEADLINE_S):
                rest = await read_exactly(stream.read_some, BLOB_REQUEST_BYTES - len(first))
            try:
                request = parse_blob_request(first + rest)
            except FramingError:
                self._tally.refused_requests += 1
                raise
            await self._answer(request, stream)

    async def _answer(self, request: BlobRequest, stream: PeerStream) -> None:
        priority = self._priority_of(request.blob_id)
        async with self._turn(stream.peer_id, priority) as is_ours:
            if is_ours:
                head, payload = await self._answer_to(request)
                await self._write(head, payload, priority, stream)
                return
        with trio.fail_after(WRITE_DEADLINE_S):
            await stream.write(_BUSY)

    async def _write(
        self, head: bytes, payload: bytes | bytearray, priority: Priority, stream: PeerStream
    ) -> None:
        """Write an answer piece by piece; a reader that is too slow is given up."""
        if priority is Priority.URGENT and not self._flow.upload.bytes_per_s:
            with trio.fail_after(WRITE_DEADLINE_S):
                for piece in _pieces(head, payload, BATCH_BYTES):
                    self._flow.note_sending(len(piece))
                    await stream.write(piece)
            return
        left_s = WRITE_DEADLINE_S
        for piece in _pieces(head, payload, WRITE_BYTES):
            await self._flow.wait_to_send(len(piece), priority)
            begun_at = trio.current_time()
            with trio.fail_after(left_s):
                await stream.write(piece)
            left_s -= trio.current_time() - begun_at

    @contextlib.asynccontextmanager
    async def _turn(self, peer_id: str, priority: Priority) -> AsyncIterator[bool]:
        """Wait for a slot; gives False where none became free in time."""
        of_peer = self._peers.setdefault(peer_id, _PeerSlots())
        of_peer.num_users += 1
        wanted = [of_peer.slots, self._slots]
        if priority is Priority.BULK:
            wanted = [of_peer.bulk, self._bulk, *wanted]
        taken: list[trio.Semaphore] = []
        try:
            with trio.move_on_after(BUSY_AFTER_S):
                for slot in wanted:
                    await slot.acquire()
                    taken.append(slot)
            yield len(taken) == len(wanted)
        finally:
            for slot in taken:
                slot.release()
            of_peer.num_users -= 1
            if not of_peer.num_users:
                del self._peers[peer_id]

    async def _answer_to(self, request: BlobRequest) -> tuple[bytes, bytes | bytearray]:
        """Return the beginning of the answer, and what follows it."""
        payload = await self._payload_of(request)
        if payload is None:
            self._tally.refused_requests += 1
            return encode_refusal(Status.REFUSED, "that blob is not served here"), b""
        self._tally.sent[self._purpose_of(request.blob_id)] += len(payload)
        return bytes([Status.OK]) + LENGTH.pack(len(payload)), payload

    async def _payload_of(self, request: BlobRequest) -> bytes | bytearray | None:
        store = self._store
        assert store is not None, "Invariant: attach() comes after serve()"
        if not self._may_serve(request.blob_id):
            return None
        if request.op is BlobOp.CHUNK:
            cached = store.read_cached_chunk(request.blob_id, request.chunk_index)
            if cached is not None:
                return cached
        try:
            return await trio.to_thread.run_sync(_read, store, request, limiter=self._disk)
        except (BlobUnavailableError, BlobCorruptError):
            return None


def _pieces(
    head: bytes, payload: bytes | bytearray, piece_bytes: int
) -> Iterator[bytes | memoryview]:
    """Cut `head` and `payload` into pieces; only the first is copied."""
    view = memoryview(payload)
    first = piece_bytes - len(head)
    yield head + view[:first]
    for start in range(first, len(view), piece_bytes):
        yield view[start : start + piece_bytes]


def _read(store: BlobStore, request: BlobRequest) -> bytes:
    if request.op is BlobOp.CHUNK:
        return store.read_chunk(request.blob_id, request.chunk_index)
    return encode_manifest(store.size_bytes(request.blob_id), store.chunk_hashes(request.blob_id))


class BlobClient:
    """One stream on which a blob's manifest and chunks are asked for."""

    def __init__(self, stream: PeerStream, blob_id: str, on_bytes: Callable[[int], None]) -> None:
        """Ask for `blob_id` on `stream`; `on_bytes` is told whenever some bytes have come."""
        self._stream = stream
        self._blob_id = blob_id
        self._on_bytes = on_bytes

    async def ask_manifest(self) -> None:
        """Ask for size and chunk hashes."""
        await self._ask(BlobRequest(BlobOp.MANIFEST, self._blob_id, 0))

    async def ask_chunks(self, indices: Sequence[int]) -> None:
        """Ask for some chunks; answers come in that order, after earlier ones."""
        await self._ask(*(BlobRequest(BlobOp.CHUNK, self._blob_id, index) for index in indices))

    async def _ask(self, *requests: BlobRequest) -> None:
        if requests:
            with trio.fail_after(STALL_S):
                await self._stream.write(b"".join(map(encode_blob_request, requests)))

    async def expect(self, num_bytes: int) -> None:
        """Have so many bytes of answers sent ahead of our reading them.

        Raises:
            RequestRefusedError: The peer reset the stream.
            PeerUnreachableError: The connection broke.
            trio.TooSlowError: That could not be said within 20 s.
        """
        with trio.fail_after(STALL_S):
            await self._stream.widen(num_bytes)

    async def read_manifest(self, max_bytes: int) -> tuple[int, tuple[bytes, ...]]:
        """Read the answer to a manifest request: size in bytes and hashes, not yet checked."""
        return parse_manifest(bytes(await self._read_answer(max_manifest_bytes(max_bytes))))

    async def read_chunk(self, size_bytes: int, chunk_index: int) -> bytearray:
        """Read the answer to a chunk request of a blob of `size_bytes`, not yet checked."""
        return await self._read_answer(chunk_size_bytes(size_bytes, chunk_index))

    async def _read_answer(self, max_bytes: int) -> bytearray:
        """Read one answer.

        Raises:
            BlobNotServedError: The peer does not have it.
            RequestRefusedError: The peer has no time, or reset the stream.
            FramingError: The answer is malformed or too large.
            trio.TooSlowError: No byte came for 20 s.
        """
        status, header = await read_answer_head(self._read_some)
        if status is not Status.OK:
            num_bytes = parse_length(header, max_bytes=MAX_REASON_BYTES)
            reason = spoken(await read_exactly(self._read_some, num_bytes))
            raise (BlobNotServedError if status is Status.REFUSED else RequestRefusedError)(reason)
        answer = bytearray(parse_length(header, max_bytes=max_bytes))
        await self._fill(memoryview(answer))
        return answer

    async def _fill(self, left: memoryview) -> None:
        """Read as many bytes as there is room for; none of them is copied twice."""
        total = len(left)
        while left:
            with trio.fail_after(STALL_S):
                num_bytes = await self._stream.read_into(left)
            if not num_bytes:
                raise StreamEndedError(
                    f"the stream ended after {total - len(left)} of {total} bytes"
                )
            self._on_bytes(num_bytes)
            left = left[num_bytes:]

    async def _read_some(self, num_bytes: int) -> bytes:
        with trio.fail_after(STALL_S):
            data = await self._stream.read_some(num_bytes)
        self._on_bytes(len(data))
        return data
