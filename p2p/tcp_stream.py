"""The socket under a connection: read in large pieces, counted, and closed at once when need be.

Runs in: agent. One of the guards (p2p/guards.py puts it in place).
"""

from __future__ import annotations

import contextlib
import socket
from typing import Final

import trio
from libp2p.abc import IMuxedConn
from libp2p.io.exceptions import ConnectionClosedError, IOException
from libp2p.io.trio import TrioTCPStream

from p2p.admission import Ticket
from p2p.flow import Flow
from p2p.quick_lock import take

SOCKET_READ_BYTES: Final = 256 << 10
BUSY_BUFFER_BYTES: Final = SOCKET_READ_BYTES + (66 << 10)  # and a message that is not whole yet
QUIET_BUFFER_BYTES: Final = 8 << 10  # of a connection that carries little: 200 are 1.6 MB
QUIET_READ_BYTES: Final = 4 << 10
UNSENT_BYTES: Final = 256 << 10  # in the system's hands; trio has 16 KiB, which is a wait for each
HANDSHAKE_READ_BYTES: Final = 4 << 10
MAX_HANDSHAKE_BYTES: Final = 64 << 10  # until the other end has proven who it is
LENGTH_BYTES: Final = 2  # of a noise message
MAX_READ_BYTES: Final = 64 << 10  # one noise message; what strangers announce may be more


class GuardedTcpStream(TrioTCPStream):  # type: ignore[misc] # libp2p is untyped
    """A socket read in large pieces. New: frames in many segments; also 10-15 % less CPU for bulk.

    `read(n)` waits for all n bytes (up to 64 KiB), since libp2p gives up after 100 short reads.
    """

    def __init__(self, stream: trio.SocketStream) -> None:
        super().__init__(stream)
        self._cached_remote_address: tuple[str, int] | None = None
        self._buffer = bytearray(QUIET_BUFFER_BYTES)
        self._start = self._end = 0  # what is unread of the buffer
        self._last_fill = 0
        self.ticket: Ticket | None = None
        """The place of a socket that was accepted; None: we dialled."""
        self.is_authenticated = False
        """Whether the other end has proven who it is."""
        self.last_received_at = trio.current_time()
        self.num_bytes_received = 0
        self.num_bytes_sent = 0
        self._flow: Flow | None = None

    def count_in(self, flow: Flow) -> None:
        """Have `flow` count what is sent and received, and hold up reading where it must."""
        self._flow = flow
        if not flow.upload.bytes_per_s and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            with contextlib.suppress(OSError):
                self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        flow.note_written(self.num_bytes_sent)  # so far: the handshake
        flow.note_read(self.num_bytes_received)
        if flow.download.bytes_per_s:
            # What the system takes off the line before we read it must not break the limit.
            with contextlib.suppress(OSError):
                self.stream.setsockopt(
                    socket.SOL_SOCKET, socket.SO_RCVBUF, flow.max_read_bytes(SOCKET_READ_BYTES)
                )

    async def read(self, n: int | None = None) -> bytes:
        """Read `n` bytes, fewer at the end of the stream or past 64 KiB."""
        wanted = 1 if n is None else min(n, MAX_READ_BYTES)
        while self._end - self._start < wanted and await self._fill(wanted):
            pass
        end = self._end if n is None else min(self._end, self._start + n)
        with memoryview(self._buffer) as view:
            result = bytes(view[self._start : end])
        self._start = end
        return result

    async def read_message(self) -> memoryview:
        """Read a message of up to 64 KiB that its length, two bytes, stands before.

        Returns:
            The message as it lies in the buffer: right until the next read.

        Raises:
            ConnectionClosedError: The stream ended first.
        """
        while (message := self.take_message()) is None:
            await self._need(self._due_bytes())
        return message

    def take_message(self) -> memoryview | None:
        """Give the next message as `read_message` does, or None where it is not whole yet."""
        start, end = self._start + LENGTH_BYTES, self._start + self._due_bytes()
        if end > self._end:
            return None
        self._start = end
        return memoryview(self._buffer)[start:end]

    def _due_bytes(self) -> int:
        """Tell how long the next message is with its length, as far as that is here."""
        start = self._start + LENGTH_BYTES
        if start > self._end:
            return LENGTH_BYTES
        return LENGTH_BYTES + int.from_bytes(self._buffer[self._start : start], "big")

    async def _need(self, num_bytes: int) -> None:
        while self._end - self._start < num_bytes:
            if not await self._fill(num_bytes):
                raise ConnectionClosedError("connection closed", transport="tcp")

    async def _fill(self, wanted: int) -> int:
        """Read what the socket has, and make room for `wanted` unread bytes; 0 at the end."""
        if self._flow is not None:
            await self._flow.wait_to_read()
        room = self._make_room(wanted)
        num_bytes = await self._receive_into(self._end, room)
        if self._flow is not None:
            self._flow.note_read(num_bytes)
        if num_bytes:
            self.last_received_at = trio.current_time()
        self.num_bytes_received += num_bytes
        self._end += num_bytes
        self._last_fill = num_bytes
        return num_bytes

    def _make_room(self, wanted: int) -> int:
        """Move what is unread to the front of a buffer that fits; return how much to read."""
        most, unread = self._max_piece_bytes(), self._end - self._start
        is_busy = max(wanted, self._last_fill) > QUIET_READ_BYTES
        size = BUSY_BUFFER_BYTES if is_busy else QUIET_BUFFER_BYTES
        source = self._buffer
        if size > len(source) or (size < len(source) and not unread):
            self._buffer = bytearray(size)
        elif unread and len(source) - self._end >= min(most, MAX_READ_BYTES):
            return min(most, len(source) - self._end)
        with memoryview(source) as view:
            self._buffer[:unread] = view[self._start : self._end]
        self._start, self._end = 0, unread
        return min(most, len(self._buffer) - unread)

    async def _receive_into(self, start: int, room: int) -> int:
        await take(self.read_lock)
        try:
            with memoryview(self._buffer) as view, view[start : start + room] as piece:
                num_bytes: int = await self.stream.socket.recv_into(piece)
                return num_bytes
        except trio.ClosedResourceError:  # by us
            return 0
        except OSError as error:
            if not self.is_open:
                return 0
            raise _reset(error) from error
        finally:
            self.read_lock.release()

    def _max_piece_bytes(self) -> int:
        if self._flow is not None:
            return self._flow.max_read_bytes(SOCKET_READ_BYTES)
        if self.is_authenticated:
            return SOCKET_READ_BYTES
        if self.num_bytes_received >= MAX_HANDSHAKE_BYTES:
            raise IOException("too many bytes before the handshake is done")
        return HANDSHAKE_READ_BYTES

    async def write(self, data: bytes) -> None:
        """Write all of `data`; nothing where we have closed the socket."""
        await take(self.write_lock)
        try:
            await self.stream.send_all(data)
        except trio.BrokenResourceError as error:
            raise _reset(error) from error
        except trio.ClosedResourceError:  # by us; what is above ends for the same reason
            return
        finally:
            self.write_lock.release()
        self.num_bytes_sent += len(data)
        if self._flow is not None:
            self._flow.note_written(len(data))

    def count_refused_in(self, flow: Flow) -> None:
        """Have `flow` count what came to nothing: the other end has not proven who it is."""
        if self._flow is None:
            flow.note_written(self.num_bytes_sent)
            flow.note_read(self.num_bytes_received)

    def get_remote_address(self) -> tuple[str, int] | None:
        """Give host and port; stock code gives None for IPv6, whose name has four parts."""
        if self._cached_remote_address is None:
            with contextlib.suppress(OSError):
                host, port = self.stream.socket.getpeername()[:2]
                # A socket that listens on :: gives IPv4 addresses as ::ffff:1.2.3.4.
                self._cached_remote_address = (str(host).removeprefix("::ffff:"), int(port))
        return self._cached_remote_address

    @property
    def is_open(self) -> bool:
        """Whether the socket has not been closed on our side."""
        return bool(self.stream.socket.fileno() >= 0)

    def abort(self) -> None:
        """Close the socket at once; whoever reads or writes it wakes up. Nothing is awaited."""
        self.stream.socket.close()


def _reset(error: Exception) -> ConnectionClosedError:
    return ConnectionClosedError(f"TCP connection reset by remote peer: {error}", transport="tcp")


def tcp_stream_of(muxed_conn: IMuxedConn) -> GuardedTcpStream:
    """Find the socket under a multiplexed connection."""
    stream = muxed_conn.secured_conn.conn.read_writer.read_write_closer.stream
    assert isinstance(stream, GuardedTcpStream), (
        "Invariant: install() ran before the first connection"
    )
    return stream
