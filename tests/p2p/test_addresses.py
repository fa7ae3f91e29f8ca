"""Addresses: what is accepted, from whom, and how much of it is kept."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.addresses import (
    EXAMPLE,
    MAX_ADDRS_PER_PEER,
    MAX_KNOWN_PEERS,
    AddressBook,
    expand_wildcard,
    parse_address,
    parse_peer_address,
)
from p2p.errors import AddressError
from p2p.identity import Identity
from tests.p2p.support import new_identity

PEER = Identity(bytes(32)).peer_id


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/1.2.3.4/tcp/4001",
        "/ip6/2001:db8::1/tcp/1",
        f"/dns4/example.org/tcp/4001/p2p/{PEER}",
        EXAMPLE,
    ],
)
def test_a_right_address_reads_back(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "1.2.3.4:4001",
        "/ip4/1.2.3/tcp/4001",
        "/ip4/1.2.3.4/tcp/70000",
        "/ip4/1.2.3.4/tcp/-1",
        "/ip4/1.2.3.4/tcp/\N{ARABIC-INDIC DIGIT ONE}",
        "/ip4/1.2.3.4/udp/4001",
        "/ip6/fe80::1%eth0/tcp/1",
        "/dns4/exa mple/tcp/1",
        "/ip4/1.2.3.4/tcp/4001/p2p/QmNotEd25519",
        f"/ip4/1.2.3.4/tcp/4001/ws/{PEER}",
        "/ip4/1.2.3.4/tcp/4001/" + "x" * 1000,
    ],
)
def test_a_wrong_address_is_named_and_a_right_one_shown(text: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_address(text)
    assert repr(text[:300])[1:-1] in str(caught.value)
    assert EXAMPLE in caught.value.hint


def test_a_missing_peer_id_is_said() -> None:
    with pytest.raises(AddressError, match="/p2p/"):
        parse_peer_address("/ip4/1.2.3.4/tcp/4001")
    with pytest.raises(AddressError, match="port 0"):
        parse_peer_address(f"/ip4/1.2.3.4/tcp/0/p2p/{PEER}")


@given(st.text(max_size=200))
def test_only_address_errors_escape(text: str) -> None:
    for hostile in (text, f"/ip4/{text}/tcp/{text}", f"/ip4/1.2.3.4/tcp/1/p2p/{text}"):
        with contextlib.suppress(AddressError):
            parse_address(hostile)


def test_wildcards_become_addresses_of_interfaces() -> None:
    expanded = expand_wildcard(parse_address("/ip4/0.0.0.0/tcp/4001"))
    assert parse_address("/ip4/127.0.0.1/tcp/4001") == expanded[-1]
    assert all(address.host != "0.0.0.0" for address in expanded)
    concrete = parse_address("/ip4/127.0.0.1/tcp/1")
    assert expand_wildcard(concrete) == (concrete,)


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/0.0.0.0/tcp/1",
        "/ip4/224.0.0.1/tcp/1",
        "/ip4/169.254.169.254/tcp/80",
        "/ip4/1.2.3.4/tcp/0",
        "/dns4/example.org/tcp/1",
        f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}",  # another's
        "/ip6/ff02::1/tcp/1",
        "junk",
    ],
)
def test_what_strangers_may_not_have_us_dial(text: str) -> None:
    book = AddressBook(new_identity().peer_id)
    other = new_identity().peer_id
    assert book.remember(other, [text]) == 0
    assert book.addresses_of(other) == ()
    assert book.peers() == ()


def test_the_book_is_bounded_and_keeps_the_newest() -> None:
    book = AddressBook(new_identity().peer_id)
    peers = [new_identity().peer_id for _ in range(MAX_KNOWN_PEERS + 3)]
    for peer in peers:
        assert book.remember(peer, ["/ip4/1.2.3.4/tcp/1"], keep=peers[:1]) == 1
    assert len(book.peers()) == MAX_KNOWN_PEERS
    assert peers[0] in book.peers()
    assert peers[1] not in book.peers()
    for port in range(1, 30):
        book.remember(peers[-1], [f"/ip4/1.2.3.4/tcp/{port}"])
    assert len(book.addresses_of(peers[-1])) == MAX_ADDRS_PER_PEER
    assert book.addresses_of(peers[-1])[0].port == 29
    assert book.remember(peers[-1], ["/ip4/1.2.3.4/tcp/29"]) == 0


def test_what_the_user_gave_stays() -> None:
    own = new_identity().peer_id
    book = AddressBook(own)
    book.trust(parse_peer_address(f"/dns4/example.org/tcp/1/p2p/{PEER}"))
    book.remember(PEER, ["/ip4/1.2.3.4/tcp/1"])
    book.forget(PEER)
    assert [str(address) for address in book.addresses_of(PEER)] == [
        f"/dns4/example.org/tcp/1/p2p/{PEER}"
    ]
    book.remember(own, ["/ip4/1.2.3.4/tcp/1"])
    book.trust(parse_peer_address(f"/ip4/1.2.3.4/tcp/1/p2p/{own}"))
    assert book.peers() == (PEER,)
