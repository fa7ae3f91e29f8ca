"""The host as libp2p's Kademlia sees it: a few methods, each guarded. Runs in: agent.

KadDHT expects a libp2p host with its peer store, and would dial any address that a stranger names,
store any that it hears, and wait for streams without a deadline. It gets this instead: questions
and answers pass through p2p.kad_wire, dials through p2p.dialer, and addresses are those of
p2p.members (proven) and of a bounded book of what others said (hearsay, dialled, never passed on).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import trio
from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from p2p.address_scope import addresses_for
from p2p.addresses import Address, AddressBook
from p2p.dialer import Addresses, Dialer
from p2p.errors import FramingError, PeerUnreachableError
from p2p.host import Host
from p2p.kad_wire import (
    KAD_PROTOCOL,
    MAX_RESPONSE_BYTES,
    addresses_in,
    cut_request,
    encode_varint_frame,
    parse_response,
    peer_id_of,
    read_varint_frame,
)
from p2p.peer_stream import PeerStream
from p2p.swarm_types import Tally

PURPOSE: Final = "dht"
ASK_TIMEOUT_S: Final = 8.0  # dial, question and answer
AVOID_S: Final = 120.0  # a peer that could not be reached
MAX_AVOIDED: Final = 256
ALIVE_S: Final = 3600.0  # since a peer was last connected


def plain_id(peer: ID) -> str:
    """Give a libp2p id as text."""
    return str(peer)


def to_multiaddrs(addresses: Sequence[Address]) -> list[Multiaddr]:
    """Give numeric addresses as libp2p's type, without peer ids."""
    return [Multiaddr(address.transport) for address in addresses]


class KadPeerStore:
    """What Kademlia asks of a peer store."""

    def __init__(self, addresses: Addresses, hearsay: AddressBook) -> None:
        self._addresses = addresses
        self._hearsay = hearsay

    def addrs(self, peer: ID) -> list[Multiaddr]:
        """List the addresses of a peer."""
        return to_multiaddrs(self._addresses.addresses_of(plain_id(peer)))

    def peer_ids(self) -> list[ID]:
        """List the peers with an address."""
        return [ID.from_base58(peer_id) for peer_id in self._addresses.peers()]

    def peers_with_addrs(self) -> list[ID]:
        """List the peers with an address."""
        return self.peer_ids()

    def peer_info(self, peer: ID) -> PeerInfo:
        """Give a peer with its addresses."""
        return PeerInfo(peer, self.addrs(peer))

    def add_addrs(self, peer: ID, addrs: Sequence[Multiaddr], _ttl_s: int) -> None:
        """Note what a peer said of another one."""
        self._hearsay.remember(plain_id(peer), [str(addr) for addr in addrs])

    def get_protocols(self, _peer: ID) -> list[str]:
        """Nothing is known of protocols: identify is not spoken."""
        return []

    def get_peer_record(self, _peer: ID) -> None:
        """There are no signed records."""


class BufferedStream:
    """A stream of which libp2p reads what is there, and whose writes are collected."""

    metric_send_channel = None

    def __init__(self, peer: ID, to_read: bytes | bytearray = b"") -> None:
        self.muxed_conn = SimpleNamespace(peer_id=peer)
        self.written = bytearray()
        self.was_reset = False
        self._to_read = bytearray(to_read)

    async def read(self, n: int | None = None) -> bytes:
        """Read at most `n` bytes; b"" at the end."""
        await trio.lowlevel.checkpoint()
        piece = bytes(self._to_read[:n])
        del self._to_read[: len(piece)]
        return piece

    async def write(self, data: bytes) -> None:
        """Collect `data`."""
        await trio.lowlevel.checkpoint()
        self.written += data

    async def take_written(self) -> bytes:
        """Give what libp2p has written, without the length that it put before it."""
        framed, self.written = BufferedStream(self.muxed_conn.peer_id, self.written), bytearray()
        payload = await read_varint_frame(framed.read, max_bytes=MAX_RESPONSE_BYTES)
        return payload or b""

    async def close(self) -> None:
        """End it."""

    async def reset(self) -> None:
        """Give it up."""
        self.was_reset = True


class ClientStream(BufferedStream):
    """A question to one peer, and its answer."""

    def __init__(
        self, stream: PeerStream, own_id: ID, own: Sequence[Address], tally: Tally
    ) -> None:
        super().__init__(ID.from_base58(stream.peer_id))
        self._stream = stream
        self._tally = tally
        self._own_id = own_id
        self._own = own
        self._is_over = False

    async def read(self, n: int | None = None) -> bytes:
        """Read the answer, asking first."""
        if self.written:
            self._to_read += await self._ask()
        return await super().read(n)

    async def close(self) -> None:
        """Ask where nothing was read, which tells that the peer has acted on it; then end."""
        if self._is_over:
            return
        is_whole = False
        try:
            if self.written:
                await self._ask()
            await self._stream.close()
            is_whole = True
        finally:
            self._is_over = True
            if not is_whole:
                await self._stream.reset()

    async def reset(self) -> None:
        """Give it up."""
        self._is_over = True
        await self._stream.reset()

    async def announce(self, key: bytes) -> None:
        """Have the peer put us on the list of a key, unless we can be reached nowhere."""
        if self._own:
            # libp2p would want an address here; cut_request() puts in those that may be told.
            me = Message.Peer(id=self._own_id.to_bytes())
            kind = Message.MessageType.ADD_PROVIDER
            await self._exchange(Message(type=kind, key=key, providerPeers=[me]))

    async def ask_for_providers(self, key: bytes) -> Message:
        """Ask who has announced itself under a key, without libp2p between."""
        return await self._exchange(Message(type=Message.MessageType.GET_PROVIDERS, key=key))

    async def _ask(self) -> bytes:
        answer = await self._exchange(parse_own(await self.take_written()))
        return encode_varint_frame(answer.SerializeToString())

    async def _exchange(self, question: Message) -> Message:
        with trio.fail_after(ASK_TIMEOUT_S):
            request = cut_request(question, self._own).SerializeToString()
            await self._stream.write(encode_varint_frame(request))
            self._tally.sent[PURPOSE] += len(request)
            answer = await read_varint_frame(self._stream.read_some, max_bytes=MAX_RESPONSE_BYTES)
        if answer is None:
            raise FramingError("no answer")
        self._tally.received[PURPOSE] += len(answer)
        return parse_response(answer, question.type)


class KadHost:
    """What Kademlia asks of a host."""

    def __init__(
        self,
        host: Host,
        own_peer_id: str,
        own_addresses: Callable[[], Sequence[Address]],
        addresses: Addresses,
        hearsay: AddressBook,
        dialer: Dialer,
        tally: Tally,
        *,
        max_connections: int,
    ) -> None:
        self._host = host
        self._tally = tally
        self._own_id = ID.from_base58(own_peer_id)
        self._own_addresses = own_addresses
        self._peer_store = KadPeerStore(addresses, hearsay)
        self._dialer = dialer
        self._max_connections = max_connections
        self._avoid_until: dict[str, float] = {}
        self._last_seen: dict[str, float] = {}
        self.dialled: set[str] = set()
        """Peers that were connected to for a question."""
        self.handler: Callable[[Any], Any] | None = None
        """What answers a question: KadDHT's own handler."""

    def get_id(self) -> ID:
        """Give our id."""
        return self._own_id

    def get_addrs(self) -> list[Multiaddr]:
        """List where we listen."""
        return to_multiaddrs(self._own_addresses())

    def get_peerstore(self) -> KadPeerStore:
        """Give the addresses of peers."""
        return self._peer_store

    def get_connected_peers(self) -> list[ID]:
        """List the connected peers."""
        return [ID.from_base58(peer.peer_id) for peer in self._host.peers()]

    def get_network(self) -> None:
        """There is no access to the network below."""

    def set_stream_handler(self, _protocol: str, handler: Callable[[Any], Any]) -> None:
        """Note who answers."""
        self.handler = handler

    def is_alive(self, peer: ID) -> bool:
        """Tell whether a peer is worth its place in the table: connected, or was so lately."""
        peer_id = plain_id(peer)
        if self._host.is_connected(peer_id):
            self._last_seen[peer_id] = trio.current_time()
            while len(self._last_seen) > MAX_AVOIDED:
                del self._last_seen[next(iter(self._last_seen))]
        return trio.current_time() - self._last_seen.get(peer_id, -ALIVE_S) < ALIVE_S

    async def new_stream(self, peer: ID, _protocols: Sequence[str]) -> ClientStream:
        """Open a stream for one question, connecting first where there is room for it.

        Raises:
            P2PError: The peer cannot be reached, or does not take part in the table.
        """
        peer_id = plain_id(peer)
        now = trio.current_time()
        if self._avoid_until.get(peer_id, 0.0) > now:
            raise PeerUnreachableError(f"peer {peer_id} could not be reached lately")
        is_over = False
        try:
            with trio.fail_after(ASK_TIMEOUT_S):
                await self._connect(peer_id)
                stream = await self._host.start_stream(
                    peer_id, KAD_PROTOCOL, timeout_s=ASK_TIMEOUT_S
                )
            is_over = True
        finally:
            if not is_over:
                self._avoid_until[peer_id] = now + AVOID_S
                while len(self._avoid_until) > MAX_AVOIDED:
                    del self._avoid_until[next(iter(self._avoid_until))]
        remote = self._host.remote_host(peer_id)
        own = [] if remote is None else addresses_for(remote, self._own_addresses())
        return ClientStream(stream, self._own_id, own, self._tally)

    async def _connect(self, peer_id: str) -> None:
        if self._host.is_connected(peer_id):
            return
        # A quarter of the connections is left for those whom the user or the run asks for.
        if self._host.num_connections() >= self._max_connections * 3 // 4:
            raise PeerUnreachableError("there is no room for another connection")
        await self._dialer.connect(peer_id)
        self.dialled.add(peer_id)


def providers_in(response: Message) -> dict[str, list[Address]]:
    """List the providers in an answer, with their addresses."""
    found = {}
    for peer in response.providerPeers:
        peer_id = peer_id_of(peer)
        if peer_id is not None:
            found[peer_id] = addresses_in(peer)
    return found


def parse_own(data: bytes) -> Message:
    """Read a message that libp2p itself has made.

    Raises:
        FramingError: It has made none.
    """
    message = Message()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise FramingError("libp2p has made no message") from error
    return message
