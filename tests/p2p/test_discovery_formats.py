"""What discovery reads from strangers: only its own errors escape, and only the harmless passes."""

from __future__ import annotations

import contextlib

import base58
import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from multiaddr import Multiaddr

from p2p.address_scope import Scope, addresses_for, believable, scope_of
from p2p.addresses import Address, parse_address
from p2p.errors import FramingError
from p2p.identity import Identity
from p2p.kad_wire import (
    addresses_in,
    cut_response,
    encode_multiaddr,
    encode_varint_frame,
    parse_multiaddr,
    parse_request,
    parse_response,
    peer_id_of,
    read_varint_frame,
)
from p2p.mdns import LocalPeers, announced, encode_txt, parse_txt
from p2p.peer_exchange import (
    encode_addresses,
    encode_request,
    parse_addresses,
    tag_of,
)
from p2p.peer_exchange import (
    parse_request as parse_question,
)

PEER = Identity(bytes(32)).peer_id
OTHER = Identity(bytes([1]) * 32).peer_id
KIND = Message.MessageType

ADDRESSES = st.builds(
    lambda ip, port: Address("ip6" if ip.version == 6 else "ip4", str(ip), port, None),
    st.ip_addresses(),
    st.integers(1, 65535),
)


def read_frame(data: bytes, max_bytes: int = 1000) -> bytes | None:
    rest = bytearray(data)

    async def read_some(num_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        piece = bytes(rest[:num_bytes])
        del rest[: len(piece)]
        return piece

    async def read() -> bytes | None:
        return await read_varint_frame(read_some, max_bytes=max_bytes)

    return trio.run(read)


@given(st.binary(max_size=300))
def test_varint_frames_read_back(payload: bytes) -> None:
    assert read_frame(encode_varint_frame(payload)) == payload


@given(st.binary(max_size=50))
@example(b"\xff\xff\xff\xff\xff")
@example(b"\x80")
@example(b"\xe9\x07")
def test_of_varint_frames_only_framing_errors_escape(data: bytes) -> None:
    with contextlib.suppress(FramingError):
        frame = read_frame(data, 30)
        assert frame is None or len(frame) <= 30


def test_a_frame_that_is_too_large_is_not_read() -> None:
    with pytest.raises(FramingError, match="31"):
        read_frame(b"\x1f", 30)
    with pytest.raises(FramingError, match="ended"):
        read_frame(b"\x1e", 30)
    assert read_frame(b"", 30) is None


@given(ADDRESSES)
def test_addresses_on_the_wire_are_those_of_libp2p(address: Address) -> None:
    data = encode_multiaddr(address)
    assert data == Multiaddr(address.transport).to_bytes()
    parsed = parse_multiaddr(data)
    assert parsed is None or parsed == address
    with_peer = Multiaddr(f"{address.transport}/p2p/{PEER}").to_bytes()
    assert parse_multiaddr(with_peer) == parsed


@given(st.binary(max_size=60))
def test_of_addresses_nothing_escapes(data: bytes) -> None:
    for prefix in (b"", b"\x04", b"\x29", b"\x04\x01\x02\x03\x04\x06"):
        parse_multiaddr(prefix + data)


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/1.2.3.4/udp/1/quic-v1",
        "/ip4/1.2.3.4/tcp/1/ws",
        "/dns4/example.org/tcp/1",
        "/ip4/0.0.0.0/tcp/1",
        "/ip4/224.0.0.251/tcp/5353",
        "/ip4/169.254.169.254/tcp/80",
        "/ip4/1.2.3.4/tcp/0",
        "/ip6/fe80::1/tcp/1",
        "/unix/tmp/x",
    ],
)
def test_what_is_not_dialled_does_not_pass(text: str) -> None:
    assert parse_multiaddr(Multiaddr(text).to_bytes()) is None


@given(st.binary(max_size=300))
def test_of_kademlia_messages_only_framing_errors_escape(data: bytes) -> None:
    with contextlib.suppress(FramingError):
        parse_request(data, PEER, lambda _peer, claims: claims)
    with contextlib.suppress(FramingError):
        parse_response(data, KIND.FIND_NODE)


def peer_with(peer_id: str, *addrs: str) -> Message.Peer:
    return Message.Peer(
        id=base58.b58decode(peer_id),
        addrs=[Multiaddr(addr).to_bytes() for addr in addrs],
        signedRecord=b"record",
    )


def test_a_request_is_cut_down_to_its_kind() -> None:
    crowd = [peer_with(OTHER, "/ip4/1.2.3.4/tcp/1"), peer_with(PEER, "/ip4/1.2.3.4/tcp/2")]
    asked = Message(
        type=KIND.ADD_PROVIDER,
        key=b"k",
        providerPeers=crowd,
        closerPeers=crowd,
        senderRecord=b"record",
    )
    request = parse_request(asked.SerializeToString(), PEER, lambda _peer, claims: claims)
    (provider,) = request.providerPeers
    assert peer_id_of(provider) == PEER
    assert addresses_in(provider) == [parse_address("/ip4/1.2.3.4/tcp/2")]
    assert not request.closerPeers
    assert not request.HasField("senderRecord")
    assert not provider.HasField("signedRecord")
    asked.type = KIND.FIND_NODE
    request = parse_request(asked.SerializeToString(), PEER, lambda _peer, claims: claims)
    assert not request.providerPeers


def test_values_do_not_pass() -> None:
    for kind in (KIND.PUT_VALUE, KIND.GET_VALUE):
        data = Message(type=kind, key=b"k").SerializeToString()
        with pytest.raises(FramingError):
            parse_request(data, PEER, lambda _peer, claims: claims)


def test_a_provider_without_an_address_and_a_long_key_are_refused() -> None:
    for asked in (
        Message(type=KIND.ADD_PROVIDER, key=b"k", providerPeers=[peer_with(PEER)]),
        Message(type=KIND.FIND_NODE, key=b"k" * 81),
    ):
        with pytest.raises(FramingError):
            parse_request(asked.SerializeToString(), PEER, lambda _peer, claims: claims)


def test_a_response_is_bounded_and_cut_to_what_the_asker_may_know() -> None:
    ids = [Identity(bytes([number]) * 32).peer_id for number in range(50)]
    addrs = [f"/ip4/10.0.0.{number}/tcp/1" for number in range(1, 40)]
    peers = [peer_with(peer_id, *addrs) for peer_id in ids]
    alien = Message.Peer(id=b"\x12\x20" + bytes(32), addrs=peers[0].addrs)
    sent = Message(type=KIND.FIND_NODE, key=b"k", closerPeers=[alien, *peers])
    response = parse_response(sent.SerializeToString(), KIND.FIND_NODE)
    assert [peer_id_of(peer) for peer in response.closerPeers] == ids[:20]
    assert all(len(peer.addrs) == 8 for peer in response.closerPeers)
    with pytest.raises(FramingError):
        parse_response(sent.SerializeToString(), KIND.GET_PROVIDERS)
    for asker, num_told in (("1.1.1.1", 0), ("10.9.9.9", 20)):
        cut = cut_response(
            response,
            lambda _peer, known, asker=asker: addresses_for(asker, known),  # type: ignore[misc]
            lambda _peer, _known: [],
        )
        assert len(cut.closerPeers) == num_told


@given(st.binary(max_size=300))
def test_of_questions_for_peers_only_framing_errors_escape(data: bytes) -> None:
    for hostile in (data, tag_of("x") + data):
        with contextlib.suppress(FramingError):
            parse_question(hostile)
    with contextlib.suppress(FramingError):
        parse_addresses(data)


def test_questions_for_peers_read_back() -> None:
    own = [parse_address(f"/ip4/10.0.0.1/tcp/{port}/p2p/{PEER}") for port in range(1, 12)]
    tag, parsed = parse_question(encode_request(tag_of("a run"), own))
    assert (tag, parsed) == (tag_of("a run"), own[:8])
    assert parse_addresses(encode_addresses([])) == []
    assert tag_of("a run") != tag_of("another run")


def test_scopes() -> None:
    assert scope_of("127.0.0.1") is scope_of("::1") is Scope.LOOPBACK
    assert scope_of("192.168.1.1") is scope_of("fd00::1") is scope_of("100.64.0.1") is Scope.PRIVATE
    assert scope_of("8.8.8.8") is scope_of("2600::1") is Scope.GLOBAL


def texts(addresses: list[Address]) -> list[str]:
    return [address.transport for address in addresses]


def test_nobody_outside_is_told_addresses_inside() -> None:
    mine = [
        parse_address(text)
        for text in (
            "/ip4/8.8.8.8/tcp/1",
            "/ip4/192.168.1.1/tcp/1",
            "/ip4/127.0.0.1/tcp/1",
            "/ip6/fe80::1/tcp/1",
        )
    ]
    assert len(addresses_for("9.9.9.9", mine)) == 1
    assert len(addresses_for("192.168.1.2", mine)) == 2
    assert len(addresses_for("127.0.0.1", mine)) == 3


def test_nobody_can_send_others_to_dial_a_third() -> None:
    claims = [
        parse_address(text)
        for text in ("/ip4/8.8.8.8/tcp/4001", "/ip4/192.168.1.7/tcp/4001", "/ip4/127.0.0.1/tcp/9")
    ]
    assert texts(believable("9.9.9.9", claims)) == ["/ip4/9.9.9.9/tcp/4001", "/ip4/9.9.9.9/tcp/9"]
    assert texts(believable("192.168.1.5", claims)) == [
        "/ip4/192.168.1.5/tcp/4001",
        "/ip4/192.168.1.5/tcp/9",
        "/ip4/192.168.1.7/tcp/4001",
    ]
    assert "/ip4/8.8.8.8/tcp/4001" not in texts(believable("127.0.0.1", claims))
    assert believable("9.9.9.9", []) == []


@given(st.binary(max_size=1000))
def test_of_txt_records_nothing_escapes(data: bytes) -> None:
    entry = b"dnsaddr=" + data[:200]
    for hostile in (data, bytes([len(entry)]) + entry, b"\xff" + entry):
        parsed = parse_txt(hostile)
        assert parsed is None or len(parsed[1]) <= 8


def test_txt_records_read_back_and_name_one_peer() -> None:
    mine = [parse_address(f"/ip4/10.0.0.1/tcp/{port}/p2p/{PEER}") for port in range(1, 5)]
    assert parse_txt(encode_txt(mine)) == (PEER, mine)
    other = [parse_address(f"/ip4/10.0.0.1/tcp/9/p2p/{OTHER}")]
    assert parse_txt(encode_txt([*mine, *other])) is None
    assert parse_txt(b"\x05hello" + encode_txt(mine)) == (PEER, mine)
    assert parse_txt(b"") is None


def test_loopback_is_announced_where_there_is_nothing_else() -> None:
    inside, outside = parse_address("/ip4/127.0.0.1/tcp/1"), parse_address("/ip4/10.0.0.1/tcp/1")
    assert announced([inside, outside]) == [outside]
    assert announced([inside]) == [inside]
    assert announced([]) == []


def test_announced_peers_are_bounded_and_forgotten() -> None:
    peers = LocalPeers(OTHER)
    text = encode_txt([parse_address(f"/ip4/10.0.0.1/tcp/1/p2p/{PEER}")])
    for number in range(1000):
        assert peers.take(f"{number}", text) is not None
    assert len(peers.known()) == 256
    peers.remove("999")
    peers.remove("0")
    assert len(peers.known()) == 255
    assert LocalPeers(PEER).take("1", text) is None  # oneself
    assert peers.take("1", b"junk") is None
