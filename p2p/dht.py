"""Finding peers in the distributed table of all peers: libp2p's Kademlia, guarded. Runs in: agent.

A member of a namespace puts itself on the list of those who provide the namespace's key, and reads
that list, every minute; the list lies with the peers whose ids are nearest to the key. Records live
for half an hour, and the newest twenty of a key are kept, so that neither the dead nor early liars
stay on it. What is found is hearsay: it goes to the address book, and the handshake decides.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import trio
from libp2p.abc import IHost
from libp2p.kad_dht import kad_dht, peer_routing, provider_store, routing_table
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderRecord, ProviderStore
from libp2p.kad_dht.routing_table import KBucket
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from p2p.address_scope import addresses_for, believable
from p2p.addresses import Address, AddressBook
from p2p.conduct import Misdeed
from p2p.contain import contain
from p2p.dialer import Addresses, Dialer
from p2p.errors import RequestRefusedError
from p2p.guards import running_service
from p2p.host import Host
from p2p.kad_host import PURPOSE, BufferedStream, KadHost, parse_own, providers_in
from p2p.kad_wire import (
    KAD_PROTOCOL,
    MAX_PEERS,
    MAX_REQUEST_BYTES,
    cut_response,
    encode_varint_frame,
    parse_request,
    read_varint_frame,
)
from p2p.members import Members
from p2p.peer_stream import PeerStream
from p2p.swarm_types import SwarmConfig, Tally
from p2p.token_buckets import TokenBuckets

if TYPE_CHECKING:
    from libp2p.kad_dht.pb.kademlia_pb2 import Message

NUM_TOLD: Final = 8  # of the 20 nearest to the key, at each look; a stream costs 4 ms on each side
NUM_ASKED: Final = 3  # of those, for the list, where nobody came or went; it is most of the bytes
NEAREST_S: Final = 3000.0  # for which it is not looked up anew who is nearest
WALK_EVERY_S: Final = 3600.0  # a random walk, which keeps the table filled, is some 60 streams
MAX_KEYS: Final = 1024
RECORD_S: Final = 1800.0
LOOK_TIMEOUT_S: Final = 45.0
MAX_REQUESTS_PER_STREAM: Final = 16
READ_DEADLINE_S: Final = 10.0
ANSWER_DEADLINE_S: Final = 5.0
REQUESTS_PER_S: Final = 5.0  # of one peer
REQUESTS_BURST: Final = 100.0  # a lookup asks a peer a few times
RESTART_PAUSE_S: Final = 30.0

_log = logging.getLogger("p2p.dht")
_CHANCE: Final = secrets.SystemRandom()


def install() -> None:
    """Put the guards of Kademlia in place; doing so twice is harmless."""
    for module in (kad_dht, peer_routing, provider_store):
        module.env_to_send_in_RPC = _no_signed_record
    provider_store.PROVIDER_RECORD_EXPIRATION_INTERVAL = RECORD_S
    routing_table.KBucket = GuardedBucket


def _no_signed_record(_host: IHost) -> tuple[bytes, bool]:
    return b"", False


class GuardedBucket(KBucket):  # type: ignore[misc] # libp2p is untyped
    """A part of the routing table."""

    async def _ping_peer(self, peer_id: ID) -> bool:
        """Tell whether the oldest entry keeps its place; stock code dials it, holding a lock."""
        await trio.lowlevel.checkpoint()
        return bool(self.host.is_alive(peer_id))


class GuardedProviders(ProviderStore):  # type: ignore[misc] # libp2p is untyped
    """The providers that others have us keep: bounded; the newest of a key, not the oldest."""

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        """Keep a record; the oldest one makes room."""
        records = self.providers.pop(key, {})
        self.providers[key] = records
        records.pop(str(provider.peer_id), None)
        records[str(provider.peer_id)] = ProviderRecord(provider, time.time())
        if len(records) > MAX_PEERS:
            del records[next(iter(records))]
        if len(self.providers) > MAX_KEYS:
            del self.providers[next(iter(self.providers))]


class _KadAddresses:
    """Where Kademlia's peers are: what they said themselves, then what others said of them."""

    def __init__(self, members: Members, book: AddressBook, hearsay: AddressBook) -> None:
        self._members, self._book, self._hearsay = members, book, hearsay

    def peers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self._members.peers(), *self._hearsay.peers())))

    def addresses_of(self, peer_id: str) -> tuple[Address, ...]:
        sources = (self._members, self._book, self._hearsay)
        found = dict.fromkeys(one for source in sources for one in source.addresses_of(peer_id))
        return tuple(address for address in found if address.family in ("ip4", "ip6"))


class Dht:
    """Our part in the table; it outlives hosts and Kademlia's own failures."""

    def __init__(
        self,
        *,
        tag: bytes,
        own_peer_id: str,
        own_addresses: Callable[[], Sequence[Address]],
        config: SwarmConfig,
        members: Members,
        book: AddressBook,
        get_host: Callable[[], Host | None],
        is_banned: Callable[[str], bool],
        found: Callable[[str, Sequence[Address]], None],
        note_misdeed: Callable[[str, Misdeed], None],
        tally: Tally,
    ) -> None:
        """Take part in the table.

        Args:
            tag: What stands for our namespace.
            own_peer_id: Who we are.
            own_addresses: Where we listen now.
            config: How many connections there may be, and how long a dial may take.
            members: What peers said of themselves, which may be passed on.
            book: What is known of those whom we look for.
            get_host: The host that is up.
            is_banned: Whether a peer is refused.
            found: Told of members of our namespace, and where they are; hearsay.
            note_misdeed: Told of who breaks the rules.
            tally: Where questions and answers are counted.
        """
        self._tally = tally
        self._key = b"\x12\x20" + tag  # a SHA-256 multihash, as other implementations expect
        self._own_peer_id = own_peer_id
        self._own_addresses = own_addresses
        self._config = config
        self._members = members
        self._book = book
        self._found = found
        self._note_misdeed = note_misdeed
        self._hearsay = AddressBook(own_peer_id)
        self._addresses: Addresses = _KadAddresses(members, book, self._hearsay)
        self._dialer = Dialer(self._addresses, config, get_host, is_banned)
        self._requests = TokenBuckets(per_s=REQUESTS_PER_S, burst=REQUESTS_BURST)
        self._nearest: list[ID] = []
        self._nearest_at = 0.0
        self._connected_then: frozenset[ID] = frozenset()
        self._kad: KadDHT | None = None
        self._kad_host: KadHost | None = None
        self._host: Host | None = None

    async def run(self, host: Host) -> None:
        """Take part while `host` is up; when Kademlia fails, it is started anew."""
        install()
        host.set_handler(KAD_PROTOCOL, self._answer_all)
        while True:
            with contain("dht"):
                await self._run_kad(host)
            await trio.sleep(RESTART_PAUSE_S)  # noqa: TID251 -- backoff

    async def _run_kad(self, host: Host) -> None:
        kad_host = KadHost(
            host,
            self._own_peer_id,
            self._own_addresses,
            self._addresses,
            self._hearsay,
            self._dialer,
            self._tally,
            max_connections=self._config.max_connections,
        )
        kad = KadDHT(kad_host, DHTMode.SERVER, enable_random_walk=True)
        kad.provider_store = GuardedProviders(kad_host, kad.peer_routing)
        kad._check_provider_rate_limit = lambda _peer: True  # ours counts all, and forgets peers
        kad.rt_refresh_manager.refresh_interval = WALK_EVERY_S
        try:
            async with running_service(kad):
                self._host, self._kad_host, self._kad = host, kad_host, kad
                await trio.sleep_forever()
        finally:
            self._host = self._kad_host = self._kad = None

    def table_size(self) -> int:
        """Count the peers in the routing table."""
        return 0 if self._kad is None else int(self._kad.get_routing_table_size())

    async def look(self) -> None:
        """Say that we are there, and ask who else is."""
        kad, kad_host = self._kad, self._kad_host
        if kad is None or kad_host is None or not kad_host.get_connected_peers():
            return
        with contain("dht lookup", level=logging.DEBUG), trio.move_on_after(LOOK_TIMEOUT_S):
            await self._look(kad, kad_host)
        self._hang_up(kad_host)

    async def _look(self, kad: KadDHT, kad_host: KadHost) -> None:
        connected = frozenset(kad_host.get_connected_peers())
        for peer in connected:
            await kad.add_peer(peer)
        now = trio.current_time()
        is_settled = connected == self._connected_then
        # In a small swarm there are never enough: they are looked up when there may be others.
        are_enough = len(self._nearest) >= NUM_TOLD or is_settled
        if not self._nearest or not are_enough or now - self._nearest_at > NEAREST_S:
            found = await kad.peer_routing.find_closest_peers_network(self._key)
            self._nearest, self._nearest_at = [p for p in found if p != kad_host.get_id()], now
        self._connected_then = connected
        reached: list[ID] = []
        told = self._nearest[:NUM_TOLD]
        num_asked = min(NUM_ASKED, len(told)) if is_settled else len(told)
        asked = _CHANCE.sample(told, num_asked)  # others the next time
        async with trio.open_nursery() as nursery:
            for peer in told:
                nursery.start_soon(self._tell, kad_host, peer, peer in asked, reached)
        if len(reached) < NUM_TOLD // 2:
            self._nearest = []  # look them up anew the next time

    async def _tell(self, kad_host: KadHost, peer: ID, is_asked: bool, reached: list[ID]) -> None:
        """Announce ourselves to a peer that keeps the list; if it is asked, read the list as well.

        Args:
            kad_host: for one stream, which both go on.
            peer: to whom.
            is_asked: whether to read the list.
            reached: `peer` is added to it if it could be told.
        """
        with contain("dht question", level=logging.DEBUG):
            stream = await kad_host.new_stream(peer, ())
            try:
                await stream.announce(self._key)
                response = await stream.ask_for_providers(self._key) if is_asked else None
            finally:
                await stream.close()
            reached.append(peer)
            if response is None:
                return
            for peer_id, addresses in providers_in(response).items():
                if peer_id != self._own_peer_id:
                    self._found(peer_id, addresses)

    def _hang_up(self, kad_host: KadHost) -> None:
        """Close connections that were opened for questions alone, where there are many.

        They are kept otherwise: the same peers are asked again in a minute.
        """
        host = self._host
        if host is None:
            return
        wanted = set(self._book.peers())
        kad_host.dialled = {peer for peer in kad_host.dialled - wanted if host.is_connected(peer)}
        num_spare = host.num_connections() - self._config.max_connections // 2
        for peer_id in sorted(kad_host.dialled)[: max(0, num_spare)]:
            host.drop(peer_id)

    # -- answering

    async def _answer_all(self, peer_id: str, stream: PeerStream) -> None:
        for _ in range(MAX_REQUESTS_PER_STREAM):
            with trio.fail_after(READ_DEADLINE_S):
                frame = await read_varint_frame(stream.read_some, max_bytes=MAX_REQUEST_BYTES)
            if frame is None:
                return
            if self._requests.take(peer_id, trio.current_time()):
                self._note_misdeed(peer_id, Misdeed.TOO_OFTEN)
                raise RequestRefusedError("it asks too often")
            self._tally.received[PURPOSE] += len(frame)
            answer = await self._answer(peer_id, frame)
            with trio.fail_after(READ_DEADLINE_S):
                await stream.write(encode_varint_frame(answer))
            self._tally.sent[PURPOSE] += len(answer)

    async def _answer(self, peer_id: str, frame: bytes) -> bytes:
        """Have Kademlia answer one message, both cut down to what may pass."""
        host, kad_host = self._host, self._kad_host
        remote = None if host is None else host.remote_host(peer_id)
        if kad_host is None or remote is None or kad_host.handler is None:
            raise RequestRefusedError("the table is not up")
        request = parse_request(frame, peer_id, lambda _peer_id, claims: believable(remote, claims))
        stream = BufferedStream(
            ID.from_base58(peer_id), encode_varint_frame(request.SerializeToString())
        )
        with trio.fail_after(ANSWER_DEADLINE_S):
            await kad_host.handler(stream)
        if stream.was_reset or not stream.written:
            raise RequestRefusedError("Kademlia does not answer that")
        return self._cut(await stream.take_written(), remote).SerializeToString()

    def _cut(self, data: bytes, remote: str) -> Message:
        """Tell of peers what they said themselves, and to each asker what concerns it."""

        def proven(peer_id: str, _addresses: Sequence[Address]) -> list[Address]:
            return addresses_for(remote, self._members.addresses_of(peer_id))

        def of_provider(_peer_id: str, addresses: Sequence[Address]) -> list[Address]:
            return addresses_for(remote, addresses)

        return cut_response(parse_own(data), proven, of_provider)
