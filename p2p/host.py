"""One guarded libp2p host, seen as peers, streams and protocols. Runs in: agent.

A host lives as long as its `async with` block; when something in libp2p raises all the same, the
block ends with that error and p2p.swarm opens another.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import trio
from libp2p.abc import INetConn, INetStream, INetwork, INotifee
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.peer.id import ID
from libp2p.protocol_muxer.exceptions import MultiselectClientError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from multiaddr import Multiaddr

from p2p.addresses import Address, parse_address
from p2p.contain import contain
from p2p.errors import ListenError, PeerUnreachableError, RequestRefusedError, RequestTimeoutError
from p2p.flow import Flow
from p2p.gossip_guards import GuardedPubsub
from p2p.guards import GuardedSwarm, install, running_service
from p2p.host_setup import new_basic_host, new_network, new_pubsub
from p2p.identity import Identity
from p2p.peer_stream import BROKEN, PeerStream
from p2p.swarm_types import PeerView, SwarmConfig, Tally
from p2p.tcp_stream import tcp_stream_of

SHUTDOWN_S: Final = 2.0

StreamHandler = Callable[[str, PeerStream], Awaitable[None]]
_log = logging.getLogger("p2p.host")


@dataclass(frozen=True, slots=True)
class HostEvents:
    """Whom the host tells about connections. Called in the event loop; must not block or raise."""

    peer_connected: Callable[[str], None]
    """A peer's first connection is open."""
    peer_lost: Callable[[str], None]
    """A peer's last connection is gone."""
    is_banned: Callable[[str], bool]
    """Whether the peer is to be refused."""
    gossip_sent: Callable[[str, int], None]
    """A message of a topic was written to one neighbour, its payload as so many bytes."""
    gossip_received: Callable[[str, int], None]
    """The first copy of a message of a topic has come, its payload as so many bytes."""
    note_misdeed: Callable[..., None]
    """A peer did what it should not: peer id, Misdeed, and how many times (1 where not given)."""
    flow: Flow | None = None
    """What counts the bytes of all connections."""


class _ConnectionNotifee(INotifee):  # type: ignore[misc] # libp2p is untyped
    """Passes libp2p's connection events on to the Host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        self._host._on_connected(conn)

    async def disconnected(self, network: INetwork, conn: INetConn) -> None:
        self._host._on_disconnected(conn)

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None:
        pass

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None:
        pass

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None:
        pass

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None:
        pass


class Host:
    """A running libp2p host. Made by `open_host`."""

    def __init__(
        self,
        network: GuardedSwarm,
        libp2p_host: BasicHost,
        pubsub: GuardedPubsub,
        events: HostEvents,
        tally: Tally,
    ) -> None:
        self._network = network
        self._libp2p_host = libp2p_host
        self.pubsub = pubsub
        """The publish-subscribe service, for p2p.gossip alone."""
        self._events = events
        self._tally = tally
        self._known: set[str] = set()
        self._opened_at: dict[int, float] = {}
        network.register_notifee(_ConnectionNotifee(self))

    # -- connections

    def listening_on(self) -> tuple[Address, ...]:
        """List the addresses with their real ports, wildcards as they are."""
        return tuple(parse_address(str(addr)) for addr in self._libp2p_host.get_transport_addrs())

    def is_connected(self, peer_id: str) -> bool:
        """Tell whether a connection to `peer_id` is open."""
        return bool(self._connections_to(peer_id))

    def num_connections(self) -> int:
        """Count the open connections."""
        return len(self._network.get_connections())

    def peers(self) -> tuple[PeerView, ...]:
        """List the connected peers, one entry each."""
        views = []
        for peer, conns in self._network.connections.items():
            usable = [conn for conn in conns if _is_usable(conn)]
            if usable:
                views.append(self._view(str(peer), self._network._best_connection(usable)))
        return tuple(views)

    def remote_host(self, peer_id: str) -> str | None:
        """Give the numeric address that a peer's connection comes from or goes to."""
        for conn in self._connections_to(peer_id):
            remote = tcp_stream_of(conn.muxed_conn).get_remote_address()
            if remote is not None:
                return remote[0]
        return None

    def _view(self, peer_id: str, conn: INetConn) -> PeerView:
        remote = tcp_stream_of(conn.muxed_conn).get_remote_address()
        host, port = remote or ("0.0.0.0", 0)  # noqa: S104 -- not listened on: shows that it is not known
        direction: Literal["inbound", "outbound"] = (
            "inbound" if conn.direction.name == "INBOUND" else "outbound"
        )
        return PeerView(
            peer_id=peer_id,
            addr=f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}",
            direction=direction,
            connected_s=trio.current_time() - self._opened_at.get(id(conn), trio.current_time()),
            rtt_s=conn.muxed_conn.rtt() or None,
        )

    async def dial(self, address: Address, *, timeout_s: float) -> None:
        """Open a connection to the peer that `address` names, unless there is one.

        Raises:
            PeerUnreachableError: Nobody answered there in time, or somebody else did.
        """
        assert address.peer_id is not None, (
            "Invariant: callers dial parse_peer_address() or the address book"
        )
        if self.is_connected(address.peer_id):
            return
        with contain("dial", level=logging.DEBUG) as outcome, trio.fail_after(timeout_s):
            await self._network.dial_addr(
                Multiaddr(address.transport), ID.from_base58(address.peer_id)
            )
        if isinstance(outcome.error, trio.TooSlowError):
            raise PeerUnreachableError(f"no answer from {address} within {timeout_s:g} s")
        if outcome.error is not None:
            reason = _root_cause(outcome.error)
            raise PeerUnreachableError(f"cannot connect to {address}: {reason}") from outcome.error

    def drop(self, peer_id: str) -> None:
        """Close every connection to `peer_id` at once."""
        for conn in self._connections_to(peer_id):
            tcp_stream_of(conn.muxed_conn).abort()

    def _connections_to(self, peer_id: str) -> list[INetConn]:
        conns = self._network.connections.get(ID.from_base58(peer_id), ())
        return [conn for conn in conns if _is_usable(conn)]

    def _on_connected(self, conn: INetConn) -> None:
        peer_id = str(conn.muxed_conn.peer_id)
        self._opened_at[id(conn)] = trio.current_time()
        if peer_id not in self._known:
            self._known.add(peer_id)
            self._events.peer_connected(peer_id)

    def _on_disconnected(self, conn: INetConn) -> None:
        peer = conn.muxed_conn.peer_id
        if self._opened_at.pop(id(conn), None) is None:
            return  # it was never announced
        if str(peer) in self._known and not self.is_connected(str(peer)):
            self._known.discard(str(peer))
            self._events.peer_lost(str(peer))

    # -- streams

    def set_handler(self, protocol: str, handler: StreamHandler) -> None:
        """Have `handler` answer the streams that peers open on `protocol`.

        The stream is closed when the handler returns and reset when it raises; what it raises is
        contained.
        """
        self._libp2p_host.set_stream_handler(
            TProtocol(protocol), functools.partial(self._accept, handler)
        )

    async def _accept(self, handler: StreamHandler, net_stream: INetStream) -> None:
        stream = PeerStream(net_stream, str(net_stream.muxed_conn.peer_id))
        if self._events.is_banned(stream.peer_id):
            await stream.reset()
            return
        is_answered = False
        try:
            await handler(stream.peer_id, stream)
            is_answered = True
        finally:
            await (stream.close() if is_answered else stream.reset())

    @contextlib.asynccontextmanager
    async def open_stream(
        self, peer_id: str, protocol: str, *, timeout_s: float
    ) -> AsyncIterator[PeerStream]:
        """Open a stream to a connected peer; closed after the block, reset if the block raises.

        Raises:
            PeerUnreachableError: There is no connection, or it broke.
            RequestRefusedError: The peer does not speak the protocol.
            RequestTimeoutError: The peer did not agree on the protocol in time.
        """
        stream = await self.start_stream(peer_id, protocol, timeout_s=timeout_s)
        is_whole = False
        try:
            yield stream
            is_whole = True
        finally:
            await (stream.close() if is_whole else stream.reset())

    async def start_stream(self, peer_id: str, protocol: str, *, timeout_s: float) -> PeerStream:
        """Open a stream as `open_stream` does; the caller closes or resets it."""
        if not self.is_connected(peer_id):
            raise PeerUnreachableError(f"peer {peer_id} is not connected")
        deadline = trio.current_time() + timeout_s
        stream = PeerStream(await self._new_stream(peer_id, deadline), peer_id)
        is_agreed = False
        try:
            await self._negotiate(stream, protocol, deadline)
            is_agreed = True
        finally:
            if not is_agreed:
                await stream.reset()
        return stream

    async def _new_stream(self, peer_id: str, deadline: float) -> INetStream:
        """Open a libp2p stream. Shielded: stock code loses a slot of 256 when cancelled."""
        net_stream: INetStream | None = None
        try:
            with trio.CancelScope(shield=True, deadline=deadline):
                net_stream = await self._network.new_stream(ID.from_base58(peer_id))
        except BROKEN as error:
            raise PeerUnreachableError(f"the connection to peer {peer_id} broke") from error
        if net_stream is None:
            raise RequestTimeoutError(f"no stream to peer {peer_id} in time")
        return net_stream

    async def _negotiate(self, stream: PeerStream, protocol: str, deadline: float) -> None:
        net_stream = stream._stream
        remaining_s = max(0.0, deadline - trio.current_time())
        try:
            with trio.fail_after(remaining_s):
                await self._libp2p_host.multiselect_client.select_one_of(
                    [TProtocol(protocol)],
                    MultiselectCommunicator(net_stream),
                    math.ceil(remaining_s) + 1,
                )
        except trio.TooSlowError as error:
            raise RequestTimeoutError(f"peer {stream.peer_id} did not answer in time") from error
        except (*BROKEN, MultiselectClientError) as error:
            if not stream.is_connection_up:
                raise stream.broken() from error
            raise RequestRefusedError(f"peer {stream.peer_id} does not speak {protocol}") from error
        net_stream.set_protocol(TProtocol(protocol))

    async def close(self) -> None:
        """Close every socket; libp2p, being cancelled, would leave the listening ones open.

        Connections go first, so that no shielded write holds up the end of the host.
        """
        for conn in self._network.get_connections():
            tcp_stream_of(conn.muxed_conn).abort()
        with trio.CancelScope(shield=True, deadline=trio.current_time() + SHUTDOWN_S):
            for listener in tuple(self._network.listeners.values()):
                await listener.close()
        self.pubsub.seen_messages.stop()  # a thread, which stock code never ends


def _is_usable(conn: INetConn) -> bool:
    return not conn.is_closed and tcp_stream_of(conn.muxed_conn).is_open


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error) or type(error).__name__


@contextlib.asynccontextmanager
async def open_host(
    identity: Identity,
    config: SwarmConfig,
    listen: Sequence[Sequence[Address]],
    events: HostEvents,
    tally: Tally,
) -> AsyncIterator[Host]:
    """Run a host while the block runs.

    Args:
        identity: Who we are.
        config: Limits and periods; its `listen` is not read.
        listen: Where to accept connections; of each entry, the first that can be had.
        events: Whom to tell about connections.
        tally: The counters of the swarm.

    Raises:
        ListenError: None of the addresses can be listened on.
        UnsupportedLibp2pError: The installed libp2p is not the guarded one.
    """
    install()
    network = new_network(
        identity, config, is_banned=events.is_banned, note_misdeed=events.note_misdeed
    )
    network.flow = events.flow
    libp2p_host = new_basic_host(network)
    pubsub = new_pubsub(
        libp2p_host,
        on_sent=events.gossip_sent,
        on_received=events.gossip_received,
        note_misdeed=events.note_misdeed,
    )
    host = Host(network, libp2p_host, pubsub, events, tally)
    async with running_service(network):
        await _listen(network, listen)
        async with running_service(pubsub), running_service(pubsub.router):
            await pubsub.wait_until_ready()
            try:
                yield host
            finally:
                await host.close()


async def _listen(network: GuardedSwarm, listen: Sequence[Sequence[Address]]) -> None:
    for choices in listen:
        for address in choices:
            if await network.listen(Multiaddr(address.transport)):
                break
            _log.info("cannot listen on %s", address.transport)
        else:
            raise ListenError(
                f"cannot listen on {choices[-1].transport}: another program uses it,"
                " or it is no address of this machine",
                hint="Choose another port, or port 0 to let the system choose.",
            )
