"""The swarm: peers, topics, requests and blobs, whatever happens to libp2p. Runs in: agent.

    async with open_swarm(identity, SwarmConfig(bootstrap=(...,))) as swarm:
        await swarm.subscribe("t", accept, on_message, max_bytes=65536)

Everything here is plain Python; no libp2p type leaves `p2p`. The protocols are stated in
PROTOCOL.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import trio

from p2p.address_scope import scope_of
from p2p.addresses import AddressBook, parse_address, parse_peer_address
from p2p.allowance import Allowance
from p2p.blob_exchange import BlobExchange
from p2p.contain import call_all
from p2p.dialer import Dialer
from p2p.discovery import Discovery
from p2p.errors import AddressError
from p2p.flow import Flow
from p2p.gossip import DEFAULT_PURPOSE, Gossip, OnMessage
from p2p.hello import Hellos
from p2p.host import Host, HostEvents
from p2p.host_keeper import HostKeeper
from p2p.identity import Identity, is_peer_id
from p2p.refusals import Accept, Refusals
from p2p.requests import Requests, Respond
from p2p.swarm_types import (
    Ban,
    ClockView,
    PeerVersion,
    PeerView,
    SwarmConfig,
    SwarmStatistics,
    Tally,
)

MAX_CLOCKS: Final = 8  # a median of so many is not moved by a few liars

if TYPE_CHECKING:
    from trio_typing import TaskStatus

__all__ = ["Ban", "ClockView", "PeerView", "Swarm", "SwarmConfig", "SwarmStatistics", "open_swarm"]


class Swarm(BlobExchange):
    """This volunteer's place among the peers. Made by `open_swarm`."""

    def __init__(self, identity: Identity, config: SwarmConfig) -> None:
        self.peer_id = identity.peer_id
        """Our own peer id."""
        self.protocol = config.protocol
        """The version that we speak: major, minor."""
        self._tally = Tally()
        if config.preferred_port is not None and not 1 <= config.preferred_port <= 65535:
            raise AddressError(f"{config.preferred_port} is no port")
        listen = [parse_address(text) for text in config.listen]
        self._allowance = Allowance(config.allowance_bytes)
        self._keeper = HostKeeper(identity, config, listen, self._tally, self._allowance)
        self._refusals = Refusals(self.peer_id, config, self._tally, self._end_dealings)
        self._book = AddressBook(self.peer_id)
        for text in config.bootstrap:
            self._book.trust(parse_peer_address(text))
        self._gossip = Gossip(self.peer_id, self._tally, self._refusals.note_misdeed)
        self._requests = Requests(self._tally)
        flow = Flow(config.upload_bytes_per_s, config.download_bytes_per_s, self._allowance)
        self._hellos = Hellos(
            config,
            requests=self._requests,
            drop=self._drop,
            note_misdeed=self._refusals.note_misdeed,
        )
        self._dialer = Dialer(
            self._book,
            config,
            lambda: self._host,
            self._refusals.is_banned,
            self._hellos.is_passed_over,
        )
        super().__init__(
            self.peer_id, self._tally, flow, self._dialer.connect, self._refusals.note_misdeed
        )
        self._discovery = Discovery(
            config,
            self.peer_id,
            own_addresses=self._keeper.addresses,
            get_host=lambda: self._host,
            book=self._book,
            dialer=self._dialer,
            requests=self._requests,
            tally=self._tally,
            remember=self.remember,
            is_banned=self._refusals.is_banned,
            note_misdeed=self._refusals.note_misdeed,
        )
        self._connected: set[str] = set()
        self._when_connected: list[Callable[[PeerView], None]] = [
            lambda _peer: self._blob_fetcher.note_provider()
        ]

    @property
    def _host(self) -> Host | None:
        return self._keeper.host

    # -- peers

    @property
    def listen_addrs(self) -> tuple[str, ...]:
        """Our addresses with real port and /p2p/; for wildcards, what the interfaces have now."""
        return tuple(map(str, self._keeper.addresses()))

    def peers(self) -> tuple[PeerView, ...]:
        """List the connected peers."""
        connected = () if self._host is None else self._host.peers()
        version_of = self._hellos.version_of
        return tuple(replace(peer, version=version_of(peer.peer_id)) for peer in connected)

    def differing_peers(self) -> Mapping[str, PeerVersion]:
        """List who of our namespace was heard within the hour and cannot work with us.

        Their protocol's major version is another one. They are told so, as we are, and not kept
        connected.
        """
        return self._hellos.differing()

    async def compare_clocks(self) -> tuple[ClockView, ...]:
        """Ask some connected peers what time it is; list whose clock was told within the hour.

        Takes up to 10 s. A peer is asked at most every 30 s.
        """
        asked = [peer.peer_id for peer in self.peers()][:MAX_CLOCKS]
        await self._hellos.ask_clocks(asked)
        return self._hellos.clocks.views(trio.current_time())

    def on_peer_connected(self, callback: Callable[[PeerView], None]) -> None:
        """Have `callback` called when a peer's first connection opens. It must not block."""
        self._when_connected.append(callback)

    async def connect(self, addr: str) -> None:
        """Connect to the peer at `addr`, which ends in /p2p/<peer id>, and try to stay connected.

        Raises:
            AddressError: It is no address, or lacks the peer id.
            PeerUnreachableError: Nobody answered there in time, or somebody else did. It is tried
                again later.
        """
        address = parse_peer_address(addr)
        assert address.peer_id is not None, "Invariant: parse_peer_address() requires it"
        self._book.trust(address)
        if address.peer_id != self.peer_id:
            await self._dialer.connect(address.peer_id)

    def remember(self, peer_id: str, addrs: Sequence[str]) -> int:
        """Note where a peer is said to be reached, and try to be connected to it.

        `addrs` may come from strangers: what is no numeric address is left out, at most 8 of a peer
        and those of 256 peers are kept, and the handshake proves who is there.

        Returns:
            How many addresses were taken that were not known before.
        """
        num_new = self._book.remember(peer_id, addrs, keep=self._connected)
        if num_new:
            self._dialer.look_now(peer_id)
        return num_new

    def disconnect(self, peer_id: str) -> None:
        """Close the connections to a peer and forget its addresses, unless the user gave them."""
        if is_peer_id(peer_id):
            self._book.forget(peer_id)
            self._drop(peer_id)

    def _drop(self, peer_id: str) -> None:
        if self._host is not None:
            self._host.drop(peer_id)

    def ban(self, peer_id: str, reason: str, *, ban_s: float | None = None) -> None:
        """Refuse a peer from now on: connections, requests, blobs, and messages that it wrote.

        Args:
            peer_id: Whom.
            reason: Why, for people.
            ban_s: For how many seconds; None: for good.
        """
        self._refusals.ban(peer_id, reason, ban_s=ban_s)

    def banned(self) -> Mapping[str, Ban]:
        """List the refused peers, to be kept and given back as SwarmConfig.banned."""
        return self._refusals.current()

    def on_banned(self, callback: Callable[[str, Ban], None]) -> None:
        """Have `callback` called with peer id and ban when a peer is refused. It must not block."""
        self._refusals.when_banned.append(callback)

    def _end_dealings(self, peer_id: str) -> None:
        self._discovery.forget(peer_id)
        self.disconnect(peer_id)

    # -- topics

    async def subscribe(
        self,
        topic: str,
        accept: Accept,
        on_message: OnMessage,
        *,
        max_bytes: int,
        purpose: str = DEFAULT_PURPOSE,
    ) -> None:
        """Take part in a topic.

        Args:
            topic: Its name; at most 128 characters.
            accept: Called with author and payload of every message, within 5 s, before it is
                delivered and forwarded; False refuses it. Signature and size have been checked. The
                same message may come again after two minutes, so what it says must bear repetition.
            on_message: Called with author and payload of what was accepted; one at a time. One's
                own messages are not delivered.
            max_bytes: Larger messages are refused; at most 65,536.
            purpose: What received and forwarded bytes are accounted under.

        Raises:
            MessageTooLargeError: `max_bytes` is more than gossip carries.
        """
        accept = self._refusals.unless_banned(accept)
        await self._gossip.subscribe(
            topic, accept, on_message, max_bytes=max_bytes, purpose=purpose
        )

    async def publish(self, topic: str, payload: bytes, *, purpose: str) -> None:
        """Queue a message for everyone who listens, and return at once. It may be lost.

        Raises:
            MessageTooLargeError: The payload is larger than the topic allows.
        """
        self._gossip.publish(topic, payload, purpose)
        await trio.lowlevel.checkpoint()

    # -- requests

    def serve(
        self, protocol: str, respond: Respond, *, max_request_bytes: int, purpose: str
    ) -> None:
        """Answer requests on `protocol` with what `respond` returns for peer id and payload.

        `respond` refuses by raising RequestRefusedError, whose text the peer gets; any other
        exception resets the stream, is logged and counted. It has 120 s.

        Raises:
            MessageTooLargeError: `max_request_bytes` is more than 8 MiB.
        """
        self._requests.serve(
            self._host, protocol, respond, max_request_bytes=max_request_bytes, purpose=purpose
        )

    async def request(
        self,
        peer_id: str,
        protocol: str,
        payload: bytes,
        *,
        timeout_s: float,
        max_response_bytes: int,
        purpose: str,
    ) -> bytes:
        """Ask a peer, connecting to it first where needed.

        Raises:
            PeerUnreachableError: It cannot be connected to, or the connection broke.
            RequestTimeoutError: No whole answer within `timeout_s`.
            RequestRefusedError: It said no, does not speak the protocol, or reset the stream.
            FramingError: The answer is malformed or larger than `max_response_bytes`.

        Cancellation: the stream is reset; the peer may have acted on the request.
        """
        self._hellos.verify_speaks(peer_id)
        deadline = trio.current_time() + timeout_s
        host = await self._dialer.connect_within(peer_id, timeout_s)
        return await self._requests.request(
            host,
            peer_id,
            protocol,
            payload,
            timeout_s=max(0.0, deadline - trio.current_time()),
            max_response_bytes=max_response_bytes,
            purpose=purpose,
        )

    # -- the inside

    @property
    def is_online(self) -> bool:
        """Whether any byte may go; else there are no connections, and nobody is accepted."""
        return self._allowance.is_open

    def allow(self, num_bytes: int | None) -> None:
        """Let so many bytes cross the sockets from now on, both directions together.

        Args:
            num_bytes: None: any number. 0: none; all connections end at once, and so they do when
                the last byte has gone. With more of them the swarm comes back, on the same port.
        """
        self._allowance.set(num_bytes)

    def statistics(self) -> SwarmStatistics:
        """Count what has happened so far."""
        host = self._host
        return self._tally.statistics(
            wire_bytes=(self._flow.num_bytes_written, self._flow.num_bytes_read),
            num_peers=len(self.peers()),
            num_connections=0 if host is None else host.num_connections(),
            num_known_peers=len(self._book.peers()),
            num_dropped_now=self._gossip.num_dropped_now(),
            num_banned=len(self._refusals.current()),
        )

    async def _run(self, task_status: TaskStatus[None]) -> None:
        """Run one host after another; in between, callers see PeerUnreachableError."""
        events = HostEvents(
            self._tell_connected,
            self._tell_lost,
            self._refusals.is_banned,
            self._gossip.count_sent,
            self._gossip.count_received,
            self._refusals.note_misdeed,
            self._flow,
        )
        await self._keeper.run(events, self._attach, self._detach, task_status=task_status)

    async def _attach(self, host: Host, nursery: trio.Nursery) -> None:
        self._requests.attach(host)
        self._blob_server.attach(host)
        self._hellos.attach(host, nursery)
        self._discovery.attach(host, nursery)
        await self._gossip.attach(host, nursery)
        self._dialer.look_now()

    def _detach(self) -> None:
        self._gossip.detach()
        self._hellos.detach()
        for peer_id in tuple(self._connected):
            self._tell_lost(peer_id)
        self._discovery.detach()

    def _tell_connected(self, peer_id: str) -> None:
        self._connected.add(peer_id)
        self._book.mark_reached(peer_id)
        self._hellos.on_connected(peer_id)
        self._discovery.on_connected(peer_id)
        view = next((peer for peer in self.peers() if peer.peer_id == peer_id), None)
        if view is not None:  # not gone again already
            if view.direction == "inbound":
                self._tally.dialled_us[scope_of(parse_address(view.addr).host).name.lower()] += 1
            self._tally.failed_handlers += call_all("on_peer_connected", self._when_connected, view)

    def _tell_lost(self, peer_id: str) -> None:
        self._connected.discard(peer_id)
        self._tally.dropped_peers += 1
        self._dialer.look_now()
        self._discovery.on_lost(len(self._connected))


@contextlib.asynccontextmanager
async def open_swarm(identity: Identity, config: SwarmConfig) -> AsyncIterator[Swarm]:
    """Take part in the network while the block runs.

    Raises:
        AddressError: An address in `config` is none; the message shows a right one.
        ListenError: An address in `config.listen` cannot be listened on.
        UnsupportedLibp2pError: The installed libp2p is not the one that the guards were written
            for.
    """
    swarm = Swarm(identity, config)
    body_error: Exception | None = None
    async with trio.open_nursery() as nursery:
        swarm._nursery = nursery
        try:
            await nursery.start(swarm._run)
            nursery.start_soon(swarm._dialer.run)
            nursery.start_soon(swarm._discovery.run)
            yield swarm
        except Exception as error:  # noqa: BLE001 -- raised again below, unwrapped
            body_error = error
        nursery.cancel_scope.cancel()
    if body_error is not None:
        raise body_error
