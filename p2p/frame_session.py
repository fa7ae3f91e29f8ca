"""The encrypted side of a connection, with a short way for bulk. Runs in: agent.

One of the guards (p2p/guards.py puts it in place). Stock code takes a frame through six layers,
each with locks, copies and a turn of the event loop: that was most of what a transfer cost. Here a
socket's buffer is decrypted where it lies; data and window updates of open streams, nearly all of
what comes, go straight to their streams. Every other frame is given to libp2p's own loop, which
asks for one header at a time, as it always does. On the wire nothing changes.
"""

from __future__ import annotations

import struct
from typing import Any, Final, Protocol

from libp2p.abc import ISecureConn
from libp2p.security.noise.io import MAX_PLAINTEXT_LENGTH
from libp2p.stream_muxer.yamux import yamux

from p2p.stream_window import note_opened
from p2p.tcp_stream import GuardedTcpStream

_HEADER: Final = struct.Struct(yamux.YAMUX_HEADER_FORMAT)
_LENGTH: Final = struct.Struct(">H")


class Streams(Protocol):
    """What of a multiplexer is needed here."""

    streams: dict[int, Any]
    stream_buffers: dict[int, bytearray]
    stream_events: dict[int, Any]

    def verify_room(self, num_bytes: int) -> None:
        """Raise where so many bytes more would be more than a peer may leave unread."""


class FrameSession:
    """Stands in the place of a multiplexer's secured connection, whose other parts it keeps."""

    def __init__(self, session: ISecureConn, mux: Streams) -> None:
        """Take over `session`, whose handshake is done, for `mux`."""
        self._session = session
        self._mux = mux
        noise = session.conn.noise_state.noise_protocol
        self._encrypting = noise.cipher_state_encrypt
        self._decrypting = noise.cipher_state_decrypt
        self._raw = session.conn.read_writer.read_write_closer
        self._tcp: GuardedTcpStream = self._raw.stream
        self._plain = bytearray(session._drain(None))
        """What is decrypted and not yet taken; short, but while libp2p takes its frames."""
        self._body_left = 0
        self._body_stream = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 -- it stands for what is untyped
        """Give whatever else libp2p and we ask a secured connection for."""
        return getattr(self._session, name)

    async def write(self, data: bytes | memoryview) -> None:
        """Encrypt frames and write them at once."""
        view = memoryview(data)
        parts: list[bytes] = []
        for start in range(0, len(view), MAX_PLAINTEXT_LENGTH):
            piece = view[start : start + MAX_PLAINTEXT_LENGTH]
            message = self._encrypting.encrypt_with_ad(None, piece)
            parts += (_LENGTH.pack(len(message)), message)
        await self._raw.write(b"".join(parts))

    async def read(self, num_bytes: int) -> bytes:
        """Give the next header that is libp2p's affair, after all frames before it."""
        while not self._is_header_due():
            message = await self._next_message()
            if self._plain:
                self._plain += message
            else:
                self._plain += message[self._take(memoryview(message)) :]
        return self._pop(num_bytes)

    async def read_body(self, num_bytes: int) -> bytes:
        """Give the body of the frame whose header was given last."""
        while len(self._plain) < num_bytes:
            self._plain += await self._next_message()
        return self._pop(num_bytes)

    async def _next_message(self) -> bytes:
        message = self._tcp.take_message()
        if message is None:
            message = await self._tcp.read_message()
        plain: bytes = self._decrypting.decrypt_with_ad(None, message)
        return plain

    def _pop(self, num_bytes: int) -> bytes:
        with memoryview(self._plain) as view:
            data = bytes(view[:num_bytes])
        del self._plain[:num_bytes]
        return data

    def _is_header_due(self) -> bool:
        if self._plain:
            with memoryview(self._plain) as view:
                taken = self._take(view)
            del self._plain[:taken]
        return len(self._plain) >= _HEADER.size

    def _take(self, view: memoryview) -> int:
        """Take frames from the front of `view`; return how many bytes.

        Invariant: what is left is less than a header, or begins with one for libp2p.
        """
        at, size = 0, len(view)
        while at < size:
            if self._body_left:
                end = min(size, at + self._body_left)
                self._deliver(view[at:end])
                self._body_left -= end - at
                at = end
            elif size - at < _HEADER.size or not self._begin(*_HEADER.unpack_from(view, at)):
                break
            else:
                at += _HEADER.size
        return at

    def _begin(self, _version: int, kind: int, flags: int, stream_id: int, length: int) -> bool:
        """Take a frame's header, or tell that it is libp2p's affair."""
        if flags:
            return False
        if kind == yamux.TYPE_WINDOW_UPDATE:
            stream = self._mux.streams.get(stream_id)
            if stream is not None:
                stream.send_window += length
                note_opened(stream)
            return True
        if kind != yamux.TYPE_DATA or length > yamux.MAX_WINDOW_SIZE:
            return False
        self._mux.verify_room(length)
        self._body_left, self._body_stream = length, stream_id
        return True

    def _deliver(self, data: memoryview) -> None:
        """Give data to its stream; what comes for one that has ended is dropped."""
        stream = self._mux.streams.get(self._body_stream)
        if stream is None:
            return
        self._mux.stream_buffers[self._body_stream] += data
        stream.recv_window = max(0, stream.recv_window - len(data))
        self._mux.stream_events[self._body_stream].set()
