"""Kademlia's messages, checked and cut down before libp2p sees them. Runs in: agent.

PROTOCOL.md section 7. libp2p takes 4 MiB from anybody, any number of addresses of any kind, signed
records, and values of a megabyte that it keeps for two days. Here a message is size-checked, then
parsed, then rebuilt from what is allowed in it: peer ids of our kind, few addresses that can be
dialled, of peers and providers only; values do not pass.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from typing import Final

import base58
from google.protobuf.message import DecodeError
from libp2p.kad_dht.pb.kademlia_pb2 import Message

from p2p.addresses import MAX_ADDRS_PER_PEER, Address, is_dialable_from_stranger
from p2p.errors import FramingError, StreamEndedError
from p2p.framing import ReadSome, read_exactly
from p2p.identity import is_peer_id

KAD_PROTOCOL: Final = "/allmende/kad/1.0.0"
MAX_REQUEST_BYTES: Final = 4 << 10
MAX_RESPONSE_BYTES: Final = 64 << 10
MAX_KEY_BYTES: Final = 80
MAX_PEERS: Final = 20  # Kademlia's k

_ASKED: Final = frozenset(
    {
        Message.MessageType.FIND_NODE,
        Message.MessageType.GET_PROVIDERS,
        Message.MessageType.ADD_PROVIDER,
        Message.MessageType.PING,
    }
)
# Multiaddr codes (multicodec table) of what we dial, and the length of their values in bytes.
_HOST_CODES: Final = {0x04: ("ip4", 4), 0x29: ("ip6", 16)}
_TCP_CODE: Final = 0x06

Pick = Callable[[str, Sequence[Address]], Iterable[Address]]
"""Picks those of a peer's addresses that pass, given its id."""


def encode_varint_frame(payload: bytes) -> bytes:
    """Put the length before `payload`, 7 bits a byte, the lowest first."""
    prefix = bytearray()
    rest = len(payload)
    while rest > 0x7F:
        prefix.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*prefix, rest]) + payload


async def read_varint_frame(read_some: ReadSome, *, max_bytes: int) -> bytes | None:
    """Read one frame; None where the stream ended before it.

    Raises:
        FramingError: The frame is larger than `max_bytes`, or its length is none.
        StreamEndedError: The stream ended inside it.
    """
    length = 0
    for shift in range(0, 28, 7):
        byte = await read_some(1)
        if not byte:
            if shift == 0:
                return None
            raise StreamEndedError("the stream ended inside a frame's length")
        length |= (byte[0] & 0x7F) << shift
        if not byte[0] & 0x80:
            break
    else:
        raise FramingError("a frame's length of more than 4 bytes")
    if length > max_bytes:
        raise FramingError(f"a frame of {length} bytes where {max_bytes} are allowed")
    return await read_exactly(read_some, length)


def encode_multiaddr(address: Address) -> bytes:
    """Encode a numeric address without its peer id, as libp2p does on the wire."""
    ip = ipaddress.ip_address(address.host)
    code = 0x04 if ip.version == 4 else 0x29
    return bytes([code]) + ip.packed + bytes([_TCP_CODE]) + address.port.to_bytes(2, "big")


def parse_multiaddr(data: bytes) -> Address | None:
    """Read an address from the wire; None where it is none that could be dialled.

    What follows the port (a peer id, which is known) is not looked at, unless it is another
    transport.
    """
    family, size = _HOST_CODES.get(data[0], ("", 0)) if data else ("", 0)
    host, rest = data[1 : 1 + size], data[1 + size :]
    if not size or len(rest) < 3 or rest[0] != _TCP_CODE:
        return None
    if rest[3:] and not rest[3:].startswith(b"\xa5\x03"):  # /p2p
        return None
    address = Address(
        family, str(ipaddress.ip_address(host)), int.from_bytes(rest[1:3], "big"), None
    )
    return address if is_dialable_from_stranger(address) else None


def _parse(data: bytes) -> Message:
    message = Message()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise FramingError("no Kademlia message") from error
    if message.type not in _ASKED or len(message.key) > MAX_KEY_BYTES:
        raise FramingError("no Kademlia message that is spoken here")
    return message


def parse_request(data: bytes, asker_id: str, pick: Pick) -> Message:
    """Read a question, cut down to what its kind needs.

    Args:
        data: What came.
        asker_id: Who asks; a peer may name itself alone as provider.
        pick: Which of the addresses that the asker claims are believed.

    Raises:
        FramingError: It is none that is spoken here.
    """
    asked = _parse(data)
    request = Message(type=asked.type, key=asked.key)
    if asked.type == Message.MessageType.ADD_PROVIDER:
        own = [peer for peer in asked.providerPeers if peer_id_of(peer) == asker_id]
        _copy_peers(own[:1], request.providerPeers, pick)
        if not request.providerPeers:
            raise FramingError("a provider that can be reached nowhere")
    return request


def parse_response(data: bytes, kind: int) -> Message:
    """Read an answer to a question of `kind`.

    Raises:
        FramingError: It is none.
    """
    answered = _parse(data)
    if answered.type != kind:
        raise FramingError("an answer to another question")
    response = Message(type=answered.type, key=answered.key)
    _copy_peers(answered.closerPeers, response.closerPeers, _all_of)
    _copy_peers(answered.providerPeers, response.providerPeers, _all_of)
    return response


def cut_response(response: Message, closer: Pick, providers: Pick) -> Message:
    """Cut our own answer down to what the asker may be told.

    Args:
        response: What libp2p would send.
        closer: Which addresses are told of a peer that is nearer to the key.
        providers: Which addresses are told of a provider.
    """
    cut = Message(type=response.type, key=response.key)
    _copy_peers(response.closerPeers, cut.closerPeers, closer)
    _copy_peers(response.providerPeers, cut.providerPeers, providers)
    return cut


def cut_request(request: Message, own: Sequence[Address]) -> Message:
    """Cut our own question down; `own` are those of our addresses that the peer may be told."""
    cut = Message(type=request.type, key=request.key)
    _copy_peers(request.providerPeers, cut.providerPeers, lambda _peer_id, _addresses: own)
    return cut


def addresses_in(peer: Message.Peer) -> list[Address]:
    """List the addresses of a peer that could be dialled."""
    parsed = [parse_multiaddr(bytes(data)) for data in peer.addrs[: 2 * MAX_ADDRS_PER_PEER]]
    return [address for address in parsed if address is not None][:MAX_ADDRS_PER_PEER]


def peer_id_of(peer: Message.Peer) -> str | None:
    """Give the id of a peer in a message, or None where it is not of our kind."""
    if len(peer.id) > 64:
        return None
    text = str(base58.b58encode(bytes(peer.id)), "ascii")
    return text if is_peer_id(text) else None


def _all_of(_peer_id: str, addresses: Sequence[Address]) -> Iterable[Address]:
    return addresses


def _copy_peers(
    source: Iterable[Message.Peer], target: MutableSequence[Message.Peer], pick: Pick
) -> None:
    """Copy what passes: peers of our kind with an address that is picked, at most 20."""
    for peer in source:
        peer_id = peer_id_of(peer)
        if peer_id is None or len(target) >= MAX_PEERS:
            continue
        addresses = list(pick(peer_id, addresses_in(peer)))[:MAX_ADDRS_PER_PEER]
        if addresses:
            target.append(
                Message.Peer(
                    id=peer.id,
                    addrs=[encode_multiaddr(address) for address in addresses],
                    connection=peer.connection,
                )
            )
