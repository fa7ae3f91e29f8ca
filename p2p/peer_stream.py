"""One stream to a peer, without libp2p's types and exceptions. Runs in: agent."""

from __future__ import annotations

import contextlib
import struct
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.exceptions import StreamEOF
from libp2p.stream_muxer.exceptions import MuxedStreamError
from libp2p.stream_muxer.yamux.yamux import TYPE_DATA, YAMUX_HEADER_FORMAT

from p2p import stream_window
from p2p.errors import PeerUnreachableError, RequestRefusedError

WRITE_BYTES: Final = 65_507  # one yamux frame that is one noise message: 122 MB/s instead of 93
BATCH_BYTES: Final = 6 * WRITE_BYTES  # frames written at once: a chunk of 1 MiB takes three writes
WORTH_BYTES: Final = 2 * WRITE_BYTES  # readers tell of the half of a window, which is 256 KiB
WORTH_S: Final = 1.0  # so long a small window may stay small before small frames are sent
READER_DEADLINE_S: Final = 5.0  # of a peer that reads nothing

_DATA_HEADER: Final = struct.Struct(YAMUX_HEADER_FORMAT)

# What a broken stream or connection raises, depending on which layer notices first.
BROKEN: Final = (
    BaseLibp2pError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    OSError,
    KeyError,
    ValueError,  # a peer's text that is no UTF-8, in negotiation
    RuntimeError,
)


class PeerStream:
    """One stream to a peer. A method may wait while the peer is alive: bring a deadline."""

    def __init__(self, net_stream: INetStream, peer_id: str) -> None:
        self._stream = net_stream
        self.peer_id = peer_id

    @property
    def is_connection_up(self) -> bool:
        """Whether the connection below still stands, which tells a reset from a lost peer."""
        return not self._stream.muxed_conn.event_shutting_down.is_set()

    async def read_some(self, num_bytes: int) -> bytes:
        """Read 1 to `num_bytes` bytes, or b"" at the end, which a killed sender may look like.

        Raises:
            RequestRefusedError: The peer reset the stream.
            PeerUnreachableError: The connection broke.
        """
        data = bytearray(min(num_bytes, self._num_waiting()))
        if data:
            await self._take_waiting(data)
            return bytes(data)
        return await self._read_stock(num_bytes)

    async def read_into(self, view: memoryview) -> int:
        """Read 1 to `len(view)` bytes into `view`; 0 at the end. Otherwise as `read_some`."""
        num_bytes = min(len(view), self._num_waiting())
        if num_bytes:
            await self._take_waiting(view[:num_bytes])
            return num_bytes
        data = await self._read_stock(len(view))
        view[: len(data)] = data
        return len(data)

    def _num_waiting(self) -> int:
        """Count what has come, of a stream that is open: about others libp2p knows best."""
        stream = self._stream.muxed_stream
        if stream.closed or stream.recv_closed or stream.reset_received:
            return 0
        return len(stream.conn.stream_buffers.get(stream.stream_id, b""))

    async def _take_waiting(self, target: bytearray | memoryview) -> None:
        """Move what has come into `target`, without the waits and copies of stock code."""
        stream = self._stream.muxed_stream
        buffer = stream.conn.stream_buffers[stream.stream_id]
        num_bytes = len(target)
        with memoryview(buffer) as view:
            target[:] = view[:num_bytes]
        del buffer[:num_bytes]
        try:
            await stream_window.tell_window(stream, bytes_read=num_bytes)
            await trio.lowlevel.checkpoint_if_cancelled()  # who reads on gives way soon
        except BROKEN as error:
            raise self.broken() from error

    async def _read_stock(self, num_bytes: int) -> bytes:
        try:
            data: bytes = await self._stream.read(num_bytes)
        except StreamEOF as error:
            # libp2p calls the end of a reset stream, or of a broken connection, clean as well.
            if self.is_connection_up and not self._stream.muxed_stream.reset_received:
                return b""
            raise self.broken() from error
        except BROKEN as error:
            raise self.broken() from error
        return data

    async def write(self, data: bytes | memoryview) -> None:
        """Write all of `data`.

        Raises:
            RequestRefusedError: The peer reset the stream, or did not read for 5 s.
            PeerUnreachableError: The connection broke.

        Cancellation: a whole number of frames was sent; reset the stream.
        """
        left = memoryview(data)
        try:
            while left:
                await self._wait_window(len(left))
                num_bytes = await self._write_batch(left[:BATCH_BYTES])
                if not num_bytes:
                    piece = bytes(left[:WRITE_BYTES])
                    await self._stream.write(piece)
                    num_bytes = len(piece)
                left = left[num_bytes:]
        except BROKEN as error:
            raise self.broken() from error

    async def _wait_window(self, num_bytes: int) -> None:
        """Wait for room: for two frames a while, for some bytes as long as libp2p would.

        Raises:
            MuxedStreamError: The peer does not read.
        """
        stream = self._stream.muxed_stream
        wanted = min(num_bytes, WORTH_BYTES)
        if stream.send_window >= wanted:
            return
        await stream_window.wait_window(stream, wanted, WORTH_S)
        await stream_window.wait_window(stream, 1, READER_DEADLINE_S)
        if not (stream.send_window or stream.closed or stream.send_closed):
            raise MuxedStreamError(f"the peer has read nothing for {READER_DEADLINE_S:g} s")

    async def widen(self, num_bytes: int) -> None:
        """Have the peer send `num_bytes` ahead, without waiting until we have read them.

        Raises:
            RequestRefusedError: The peer reset the stream.
            PeerUnreachableError: The connection broke.
        """
        try:
            await stream_window.widen(self._stream.muxed_stream, num_bytes)
        except BROKEN as error:
            raise self.broken() from error

    async def _write_batch(self, view: memoryview) -> int:
        """Write several frames at once; return how many bytes of `view` that were.

        Most of what a frame costs is waking up and taking locks. 0 where the peer has left no room,
        or the stream has ended: then libp2p's own way says why not.

        Invariant: nothing is awaited between reading the window and taking from it.
        """
        stream = self._stream.muxed_stream
        num_bytes = min(int(stream.send_window), len(view))
        if WRITE_BYTES < num_bytes < len(view):
            num_bytes -= num_bytes % WRITE_BYTES
        if num_bytes <= 0 or stream.send_closed or stream.closed:
            return 0
        stream.send_window -= num_bytes
        frames: list[bytes | memoryview] = []
        for start in range(0, num_bytes, WRITE_BYTES):
            body = view[start : min(start + WRITE_BYTES, num_bytes)]
            frames += [_DATA_HEADER.pack(0, TYPE_DATA, 0, stream.stream_id, len(body)), body]
        await stream.conn._write_frame(b"".join(frames))
        return num_bytes

    def broken(self) -> PeerUnreachableError | RequestRefusedError:
        """Make the error that says what became of the stream."""
        if self.is_connection_up:
            return RequestRefusedError(f"peer {self.peer_id} reset the stream")
        return PeerUnreachableError(f"the connection to peer {self.peer_id} broke")

    async def close(self) -> None:
        """Say that nothing more will be written."""
        with contextlib.suppress(*BROKEN):
            await self._stream.close()

    async def reset(self) -> None:
        """Give the stream up in both directions."""
        with trio.CancelScope(shield=True), contextlib.suppress(*BROKEN):
            await self._stream.reset()
