"""Gossip that is packed: a neighbour's stream is one deflate stream. Runs in: agent.

PROTOCOL.md section 5. Gossip says the same things again and again: each copy of a message names the
topic (90 bytes), its author twice, the run, and the hashes of the round; so does each word about a
message that is offered. What was said before on the same stream costs three bytes, and what is left
of a record is its two signatures and the hashes that are new.

Invariant: of a stream that is packed, every frame is packed and written, in that order, or none any
more: a frame that is missing would change the meaning of all that follow.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.exceptions import ParseError
from libp2p.host.basic_host import BasicHost
from libp2p.network.stream.exceptions import StreamClosed, StreamReset
from libp2p.peer.id import ID
from libp2p.utils.varint import decode_varint_with_size, encode_varint_prefixed

from p2p.tcp_stream import tcp_stream_of

PACKED_PROTOCOL: Final = TProtocol("/allmende/meshsub/1")
WINDOW_BITS: Final = 14  # what is looked back on: 16 KiB, some twenty records
MEMORY_LEVEL: Final = 7  # with the window 128 KiB for each neighbour that we send to
SPARE_FRACTION: Final = 64  # what does not pack gets longer, by far less than a 64th of it
SPARE_BYTES: Final = 64
_TAIL: Final = b"\x00\x00\xff\xff"
"""Every flush ends in it, so it is left out (as in RFC 7692, section 7.2.1)."""


def most_packed_bytes(frame_bytes: int) -> int:
    """Return how long a frame of so many bytes is at most when it is packed."""
    return frame_bytes + frame_bytes // SPARE_FRACTION + SPARE_BYTES


class Packer:
    """One direction of one stream, at the sender."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(
            zlib.Z_DEFAULT_COMPRESSION, zlib.DEFLATED, -WINDOW_BITS, MEMORY_LEVEL
        )

    def pack(self, frame: bytes) -> bytes:
        """Return what stands for `frame` at this place in the stream."""
        packed = self._deflate.compress(frame) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return packed.removesuffix(_TAIL)


class Unpacker:
    """One direction of one stream, at the receiver."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(-WINDOW_BITS)

    def unpack(self, packed: bytes, max_bytes: int) -> bytes:
        """Return the frame; no more than `max_bytes` are ever unpacked, whatever is claimed.

        Raises:
            ParseError: It is malformed, or the frame is larger, or less than half as long as what
                came, which only costs time. The stream is of no use any more.
        """
        try:
            frame = self._inflate.decompress(packed + _TAIL, max_bytes + 1)
        except zlib.error as error:
            raise ParseError(f"a packed frame that is none: {error}") from error
        if len(frame) > max_bytes or self._inflate.eof:
            raise ParseError("a packed frame that is too large, or ends the stream")
        if len(packed) > 2 * len(frame) + SPARE_BYTES:
            raise ParseError(f"{len(packed)} packed bytes for a frame of {len(frame)}")
        return frame


class PackedStream:
    """A stream to a neighbour, for libp2p's publish-subscribe service: frames go out packed."""

    def __init__(self, stream: INetStream) -> None:
        """Pack what is written to `stream`."""
        self._stream = stream
        self._packer = Packer()
        self._lock = trio.Lock()  # of several that write, the first one that packed writes first
        self.packed_fraction = 1.0
        """How much was left of the last frame."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- it stands for what is untyped
        """Give whatever else libp2p asks a stream for."""
        return getattr(self._stream, name)

    async def write(self, data: bytes) -> None:
        """Write one frame, before which libp2p has put its length.

        Cancellation: the connection ends, as with a frame that can't be written to the end: the
        neighbour would understand nothing any more.
        """
        num_bytes, start = decode_varint_with_size(data)
        async with self._lock:
            packed = self._packer.pack(data[start:])
            self.packed_fraction = min(1.0, len(packed) / max(1, num_bytes))
            is_over = False
            try:
                await self._stream.write(encode_varint_prefixed(packed))
                is_over = True
            except (StreamClosed, StreamReset):
                is_over = True  # by the neighbour, who knows
                raise
            finally:
                if not is_over:
                    tcp_stream_of(self._stream.muxed_conn).abort()


class PackingHost(BasicHost):  # type: ignore[misc] # libp2p is untyped
    """Opens streams; what gossip writes to one that is agreed to be packed, is packed."""

    async def new_stream(self, peer_id: ID, protocol_ids: Sequence[TProtocol]) -> INetStream:
        """Open a stream with the first of these protocols that the peer speaks."""
        stream: INetStream = await super().new_stream(peer_id, protocol_ids)
        return PackedStream(stream) if stream.get_protocol() == PACKED_PROTOCOL else stream
