"""What keeps py-libp2p 0.8.1 alive among strangers: one guard for each fault. Runs in: agent.

The faults and their measurements are in LIBP2P.md (numbered there; "new" ones were found in reading
0.8.1).

 1 inbound slots and tasks never freed      GuardedSwarm._handle_inbound_connection
 2 an exception in a handler kills the host GuardedSwarmConn, GuardedManager
 3 one malformed frame kills the host       the same; p2p.gossip_guards
 4 a raising validator kills the host       GuardedManager (and p2p.gossip uses async ones only)
 5 plaintext accepted                       p2p.host passes noise alone
 6 frozen peers never noticed               GuardedYamux._measure_rtt_loop (p2p.guarded_yamux)
 7 a killed sender looks like a clean end   p2p.framing: lengths everywhere
 8 a reader that stalls breaks the writer   p2p.blobs drains at once; PeerStream writes 65,507 bytes
 9 gossip drops in silence                  wider queues here, pacing in p2p.gossip, and a count
10 mDNS advertises 0.0.0.0, blocks the loop p2p.mdns, with a thread of its own, instead
11 the host's nursery dies                  p2p.swarm restarts it
new: a cancelled write cuts a frame in two and breaks the connection for all
GuardedYamux._write_frame
new: both sides write, neither reads: deadlock                                 the same
new: unread data is unbounded; so is the number of streams                     GuardedYamux,
GuardedSwarmConn
new: addresses from strangers are stored and dialled                           GuardedSwarm,
install()
new: a frame that arrives in more than 100 TCP segments breaks the connection  GuardedTcpStream
new: silent sockets take the slots of connections                              p2p.admission
new: two programs can listen on one port, each getting half of the dials       install()
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import libp2p
import trio
from libp2p.abc import IHost, IMuxedConn, IMuxedStream, INetConn
from libp2p.io.abc import ReadWriteCloser
from libp2p.network import swarm as swarm_module
from libp2p.network.connection import swarm_connection
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.pubsub import gossipsub as gossipsub_module
from libp2p.pubsub import pubsub as pubsub_module
from libp2p.pubsub.pb import rpc_pb2
from libp2p.stream_muxer import muxer_multistream
from libp2p.tools.anyio_service.api import Service
from libp2p.tools.anyio_service.trio_manager import TrioManager
from libp2p.tools.anyio_service.utils import get_task_name
from libp2p.transport.tcp import tcp
from multiaddr import Multiaddr

from p2p import stream_window
from p2p.admission import Admission
from p2p.conduct import Misdeed
from p2p.contain import contain
from p2p.errors import FramingError, StreamEndedError, UnsupportedLibp2pError
from p2p.flow import Flow
from p2p.guarded_yamux import GuardedYamux
from p2p.tcp_stream import GuardedTcpStream, tcp_stream_of

GUARDED_VERSION: Final = "0.8.1"
MAX_INBOUND_STREAMS: Final = 64  # handled at a time on one connection
MAX_OPEN_STREAMS: Final = 1024  # on one connection, half-closed ones included
SUBSCRIPTION_QUEUE: Final = 256  # messages of a topic that wait for us; 32 drop bursts

_log = logging.getLogger("p2p.guards")


def install() -> None:
    """Put the guards in place; doing so twice is harmless.

    Raises:
        UnsupportedLibp2pError: The installed libp2p is another version.
    """
    if libp2p.__version__ != GUARDED_VERSION:
        raise UnsupportedLibp2pError(
            f"libp2p {libp2p.__version__} is installed; p2p/guards.py is for {GUARDED_VERSION}",
            hint=f"Install libp2p=={GUARDED_VERSION}, or rerun the probes and revise the guards.",
        )
    tcp.TrioTCPStream = GuardedTcpStream
    muxer_multistream.Yamux = GuardedYamux
    swarm_connection.SwarmConn = GuardedSwarmConn
    tcp._set_reuse_flags = _allow_quick_restart
    stream_window.install()
    # Fault 9: a burst longer than the queue is lost in silence.
    pubsub_module.SUBSCRIPTION_CHANNEL_SIZE = SUBSCRIPTION_QUEUE
    # New: signed records fill the peer store with addresses from strangers, cost two signature
    # checks a message, and tell everyone our own addresses. They are not read, and ours names no
    # address.
    for module in (pubsub_module, gossipsub_module):
        module.maybe_consume_signed_record = _ignore_signed_record
        module.env_to_send_in_RPC = _empty_signed_record
    # It logs through the root logger, whose functions install a handler of their own.
    swarm_connection.logging = logging.getLogger("libp2p.network.connection")
    # What strangers send would fill the log with tracebacks; the guards log what matters.
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)


def _allow_quick_restart(listening: trio.socket.SocketType) -> None:
    """Let a port be taken again at once, but not shared, as stock code lets it (SO_REUSEPORT)."""
    if os.name == "posix":  # elsewhere the option means that the port may be taken away
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def _ignore_signed_record(_rpc: rpc_pb2.RPC, _host: IHost, _peer_id: ID) -> bool:
    return True


def _empty_signed_record(_host: IHost) -> tuple[bytes, bool]:
    return b"", False


class GuardedSwarmConn(swarm_connection.SwarmConn):  # type: ignore[misc] # libp2p is untyped
    """A connection whose stream handlers may fail. Fault 2."""

    async def _handle_muxed_stream(self, muxed_stream: IMuxedStream) -> None:
        peer_id = str(self.muxed_conn.peer_id)
        num_answered: Counter[str] = self.swarm.num_streams_answered
        if len(self.muxed_conn.streams) > MAX_OPEN_STREAMS:
            tcp_stream_of(self.muxed_conn).abort()
        if num_answered[peer_id] >= MAX_INBOUND_STREAMS:
            self.swarm.note_misdeed(peer_id, Misdeed.TOO_MANY_STREAMS)
            await muxed_stream.reset()
            return
        num_answered[peer_id] += 1
        try:
            await self._answer(peer_id, muxed_stream)
        finally:
            num_answered[peer_id] -= 1
            if not num_answered[peer_id]:
                del num_answered[peer_id]

    async def _answer(self, peer_id: str, muxed_stream: IMuxedStream) -> None:
        with contain("stream", peer_id=peer_id) as outcome:
            await super()._handle_muxed_stream(muxed_stream)
        if outcome.error is None:
            return
        if isinstance(outcome.error, FramingError) and not isinstance(
            outcome.error, StreamEndedError
        ):
            self.swarm.note_misdeed(peer_id, Misdeed.MALFORMED)
        with contain("reset", level=logging.DEBUG):
            await muxed_stream.reset()


class GuardedSwarm(swarm_module.Swarm):  # type: ignore[misc] # libp2p is untyped
    """Dials and listens, without the leak of fault 1, and dials nobody whom a stranger named."""

    ping_every_s = 5.0
    ping_timeout_s = 10.0
    flow: Flow | None = None
    """What counts the bytes of all connections."""

    def __init__(
        self,
        *args: Any,
        admission: Admission,
        handshake_timeout_s: float,
        is_banned: Callable[[str], bool],
        note_misdeed: Callable[[str, Misdeed], None],
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.is_banned = is_banned
        self.note_misdeed = note_misdeed
        self.num_streams_answered: Counter[str] = Counter()
        """Of each peer, on all its connections."""
        self.admission = admission
        self._handshake_timeout_s = handshake_timeout_s
        self.auto_connector.maybe_connect = self._connect_nobody

    @staticmethod
    async def _connect_nobody() -> None:
        await trio.lowlevel.checkpoint()

    def _schedule_auto_connect(self) -> None:
        """Do nothing: p2p.dialer decides whom to dial."""

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> INetConn:
        """Take a connection whose other end has proven who it is, unless that is a banned peer."""
        stream = tcp_stream_of(muxed_conn)
        if self.is_banned(str(muxed_conn.peer_id)):
            stream.abort()
            raise SwarmException(f"peer {muxed_conn.peer_id} is banned")
        if stream.ticket is not None and not self.admission.open(stream.ticket):
            stream.abort()
            raise SwarmException("there is no room for another inbound connection")
        stream.is_authenticated = True
        if self.flow is not None:
            stream.count_in(self.flow)
        return await super().add_conn(muxed_conn, direction)

    async def _handle_inbound_connection(
        self, read_write_closer: ReadWriteCloser, maddr: Multiaddr
    ) -> None:
        """Hold a place while the socket lives; stock code: while the host does. Fault 1."""
        stream: Any = read_write_closer
        remote = stream.get_remote_address()
        ticket = None if remote is None else self.admission.enter(remote[0], stream.abort)
        if ticket is None:
            stream.abort()
            return
        stream.ticket = ticket
        try:
            muxed_conn = await self._shake_hands(stream, maddr)
            if muxed_conn is not None:
                await muxed_conn.event_closed.wait()
        finally:
            stream.abort()
            self.admission.leave(ticket)
            if self.flow is not None:
                stream.count_refused_in(self.flow)

    async def _shake_hands(self, stream: GuardedTcpStream, maddr: Multiaddr) -> IMuxedConn | None:
        """Give the multiplexed connection, or None where the other end is too slow or no peer."""
        with (
            contain("inbound handshake", level=logging.DEBUG),
            trio.move_on_after(self._handshake_timeout_s),
        ):
            return await self.upgrade_inbound_raw_conn(RawConnection(stream, False), maddr)
        return None


class GuardedManager(TrioManager):  # type: ignore[misc] # libp2p is untyped
    """Runs a libp2p service whose single tasks may fail. Faults 2, 3 and 4.

    Daemon tasks (heartbeat, queues) still end the service: without them it would live and do
    nothing.
    """

    def run_task(
        self,
        async_fn: Callable[..., Awaitable[Any]],
        *args: Any,
        daemon: bool = False,
        name: str | None = None,
        _internal: bool = False,
    ) -> None:
        """Run `async_fn` in the background; unless it is a daemon, what it raises is contained."""

        async def contained(*arguments: Any) -> None:
            with contain(get_task_name(async_fn, name)):
                await async_fn(*arguments)

        fn = async_fn if daemon or _internal else contained
        super().run_task(
            fn, *args, daemon=daemon, name=get_task_name(async_fn, name), _internal=_internal
        )


@contextlib.asynccontextmanager
async def running_service(service: Service) -> AsyncIterator[None]:
    """Run a libp2p service under a GuardedManager while the block runs."""
    async with trio.open_nursery() as nursery:
        manager = GuardedManager(service)
        service._manager = manager
        nursery.start_soon(manager.run)
        await manager.wait_started()
        try:
            yield
        finally:
            await manager.stop()
