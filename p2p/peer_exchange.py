"""Asking a neighbour for members of a namespace. Runs in: agent. PROTOCOL.md section 6.

Whoever asks says where it listens, and so becomes known to the next who asks: with one neighbour in
common, all find all, and need that neighbour no more.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final

import trio

from p2p.address_scope import addresses_for, believable
from p2p.addresses import MAX_ADDRS_PER_PEER, Address, parse_address
from p2p.conduct import Misdeed
from p2p.errors import AddressError, FramingError, P2PError, RequestRefusedError
from p2p.host import Host
from p2p.members import MAX_ADDRS, MAX_SAMPLE, Members
from p2p.requests import Requests
from p2p.token_buckets import TokenBuckets

PEERS_PROTOCOL: Final = "/allmende/peers/1"
TAG_BYTES: Final = 32
MAX_REQUEST_BYTES: Final = 4 << 10
MAX_RESPONSE_BYTES: Final = 16 << 10
MAX_ADDR_LINES: Final = MAX_ADDRS_PER_PEER + MAX_SAMPLE * MAX_ADDRS
ASK_TIMEOUT_S: Final = 10.0
ASKS_PER_S: Final = 0.2
ASKS_BURST: Final = 10.0
PURPOSE: Final = "discovery"

_log = logging.getLogger("p2p.peer_exchange")
_CHANCE: Final = secrets.SystemRandom()


def tag_of(namespace: str) -> bytes:
    """Give what stands for a namespace on the wire: 32 bytes, from which it cannot be read."""
    return hashlib.sha256(b"allmende/namespace/1" + namespace.encode()).digest()


def encode_request(tag: bytes, own: Sequence[Address]) -> bytes:
    """Encode the question for members of a namespace; `own` says where the asker listens."""
    return tag + encode_addresses(own[:MAX_ADDRS_PER_PEER])


def parse_request(data: bytes) -> tuple[bytes, list[Address]]:
    """Read a question: the tag, and the asker's addresses.

    Raises:
        FramingError: It is none.
    """
    if len(data) < TAG_BYTES:
        raise FramingError(f"a question for peers of {len(data)} bytes")
    return data[:TAG_BYTES], parse_addresses(data[TAG_BYTES:])


def encode_addresses(addresses: Sequence[Address]) -> bytes:
    """Encode addresses, one a line."""
    return "\n".join(map(str, addresses)).encode("ascii")


def parse_addresses(data: bytes) -> list[Address]:
    """Read addresses, one a line; lines that are none are left out.

    Raises:
        FramingError: It is no ASCII, or has too many lines.
    """
    try:
        lines = data.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise FramingError("addresses that are no ASCII") from error
    if len(lines) > MAX_ADDR_LINES:
        raise FramingError(f"{len(lines)} addresses where {MAX_ADDR_LINES} are allowed")
    found = []
    for line in lines:
        try:
            found.append(parse_address(line))
        except AddressError:
            continue
    return found


class PeerExchange:
    """Asks and answers."""

    def __init__(
        self,
        *,
        requests: Requests,
        members: Members,
        own_peer_id: str,
        own_tag: bytes | None,
        own_addresses: Callable[[], Sequence[Address]],
        found: Callable[[str, Sequence[Address]], None],
        note_misdeed: Callable[[str, Misdeed], None],
    ) -> None:
        """Exchange peers.

        Args:
            requests: What carries questions and answers.
            members: Who has said what here.
            own_peer_id: Who we are.
            own_tag: What we belong to; None: nothing, and nobody is asked for.
            own_addresses: Where we listen.
            found: Told of peers and addresses that belong to `own_tag`; hearsay.
            note_misdeed: Told of who breaks the rules.
        """
        self._requests = requests
        self._members = members
        self._own_peer_id = own_peer_id
        self._own_tag = own_tag
        self._own_addresses = own_addresses
        self._found = found
        self._note_misdeed = note_misdeed
        self._asks = TokenBuckets(per_s=ASKS_PER_S, burst=ASKS_BURST)
        self._host: Host | None = None

    def serve(self) -> None:
        """Answer, on this host and those to come."""
        self._requests.serve(
            self._host,
            PEERS_PROTOCOL,
            self._respond,
            max_request_bytes=MAX_REQUEST_BYTES,
            purpose=PURPOSE,
        )

    def attach(self, host: Host | None) -> None:
        """Use a new host."""
        self._host = host

    async def ask(self, peer_id: str) -> bool:
        """Ask a connected peer; tell whether it answered."""
        host = self._host
        if host is None or self._own_tag is None:
            return False
        remote = host.remote_host(peer_id)
        if remote is None:
            return False
        own = addresses_for(remote, self._own_addresses())
        try:
            answer = await self._requests.request(
                host,
                peer_id,
                PEERS_PROTOCOL,
                encode_request(self._own_tag, own),
                timeout_s=ASK_TIMEOUT_S,
                max_response_bytes=MAX_RESPONSE_BYTES,
                purpose=PURPOSE,
            )
            self._take(peer_id, remote, parse_addresses(answer))
        except P2PError as error:
            _log.debug("peer=%s gave no peers: %s", peer_id, error)
            return False
        return True

    def _take(self, neighbour: str, remote: str, answer: Sequence[Address]) -> None:
        """Note what a neighbour answered: of itself, and of others."""
        assert self._own_tag is not None, "Invariant: ask() checks it"
        by_peer: dict[str, list[Address]] = {}
        for address in answer:
            if address.peer_id is not None and address.peer_id != self._own_peer_id:
                by_peer.setdefault(address.peer_id, []).append(address)
        own_claims = believable(remote, by_peer.pop(neighbour, ()))
        if own_claims:
            self._members.note(self._own_tag, neighbour, own_claims, trio.current_time())
            self._found(neighbour, own_claims)
        for peer_id, addresses in by_peer.items():
            self._found(peer_id, addresses)

    async def _respond(self, peer_id: str, request: bytes) -> bytes:
        await trio.lowlevel.checkpoint()
        now_s = trio.current_time()
        if self._asks.take(peer_id, now_s):
            self._note_misdeed(peer_id, Misdeed.TOO_OFTEN)
            raise RequestRefusedError("you ask too often")
        tag, claims = parse_request(request)
        host = self._host
        remote = None if host is None else host.remote_host(peer_id)
        if host is None or remote is None:
            raise RequestRefusedError("the connection is going down")
        own_claims = [claim for claim in claims if claim.peer_id in (None, peer_id)]
        believed = believable(remote, own_claims[:MAX_ADDRS_PER_PEER])
        self._members.note(tag, peer_id, believed, now_s)
        if tag == self._own_tag:
            self._found(peer_id, believed)
        answer = self._members.sample(
            tag,
            peer_id,
            remote,
            now_s=now_s,
            is_connected=host.is_connected,
            chance=_CHANCE,
        )
        own = addresses_for(remote, self._own_addresses()) if tag == self._own_tag else []
        return encode_addresses([*own[:MAX_ADDRS_PER_PEER], *answer])
