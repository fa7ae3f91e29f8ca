"""Addresses as text, and which ones we know of whom. Runs in: agent. Pure.

An address is /ip4|ip6|dns4|dns6|dns/<host>/tcp/<port>, with /p2p/<peer id> behind it where it names
a peer. Addresses of peers come from strangers: they are parsed here, bounded in number, and never
resolved by DNS.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import psutil

from p2p.errors import AddressError
from p2p.identity import is_peer_id

MAX_ADDRS_PER_PEER: Final = 8
MAX_KNOWN_PEERS: Final = 256
MAX_ADDR_CHARS: Final = 400
EXAMPLE: Final = (
    "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWKRyzVWW6ChFjQjK4miCty85Niy48tpPV95XdKu1BcvMA"
)

_DNS_NAME: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True, slots=True)
class Address:
    """One parsed address."""

    family: str
    """ip4, ip6, dns4, dns6 or dns."""
    host: str
    """A numeric address, or a name for the dns families."""
    port: int
    """TCP, 0..65535."""
    peer_id: str | None
    """Whose it is, where it says so."""

    @property
    def transport(self) -> str:
        """The address without the peer id."""
        return f"/{self.family}/{self.host}/tcp/{self.port}"

    def __str__(self) -> str:
        return self.transport if self.peer_id is None else f"{self.transport}/p2p/{self.peer_id}"


def parse_address(text: str) -> Address:
    """Parse an address.

    Raises:
        AddressError: It is none; the message shows a right one.
    """
    parts = text.split("/") if len(text) <= MAX_ADDR_CHARS else []
    if (
        len(parts) not in (5, 7)
        or parts[0]
        or parts[3] != "tcp"
        or (parts[5:] and parts[5] != "p2p")
    ):
        raise _not_an_address(text, "it does not read /ip4/<host>/tcp/<port>/p2p/<peer id>")
    family, host, port_text = parts[1], parts[2], parts[4]
    if not (port_text.isascii() and port_text.isdigit() and int(port_text[:6]) <= 65535):
        raise _not_an_address(text, f"{port_text!r} is no port")
    if not _is_host(family, host):
        raise _not_an_address(text, f"/{family}/{host} is no host")
    peer_id = parts[6] if len(parts) == 7 else None
    if peer_id is not None and not is_peer_id(peer_id):
        raise _not_an_address(text, f"{peer_id!r} is no Ed25519 peer id")
    return Address(family, host, int(port_text), peer_id)


def parse_peer_address(text: str) -> Address:
    """Parse an address that must say whose it is and be dialled.

    Raises:
        AddressError: It is none, or lacks the peer id.
    """
    address = parse_address(text)
    if address.peer_id is None:
        raise AddressError(
            f"{text!r} does not say whose address it is: the /p2p/<peer id> part is missing",
            hint=f"A whole one looks like {EXAMPLE} ; the other side shows its own.",
        )
    if address.port == 0:
        raise _not_an_address(text, "port 0 cannot be dialled")
    return address


def _not_an_address(text: str, reason: str) -> AddressError:
    return AddressError(
        f"{text[:MAX_ADDR_CHARS]!r} is no address: {reason}", hint=f"A right one: {EXAMPLE}"
    )


def _is_host(family: str, host: str) -> bool:
    if family in ("dns", "dns4", "dns6"):
        return _DNS_NAME.fullmatch(host) is not None
    try:
        if family == "ip4":
            return bool(ipaddress.IPv4Address(host))
        return family == "ip6" and "%" not in host and bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False


def is_dialable_from_stranger(address: Address) -> bool:
    """Tell whether a stranger's address may be dialled: numeric, unicast, with a port."""
    if address.family not in ("ip4", "ip6") or address.port == 0:
        return False
    ip = ipaddress.ip_address(address.host)
    is_reserved = ip.is_reserved and not ip.is_loopback  # ::1 counts as reserved
    return not (ip.is_unspecified or ip.is_multicast or is_reserved or ip.is_link_local)


def expand_wildcard(address: Address) -> tuple[Address, ...]:
    """Replace 0.0.0.0 and :: by the addresses of the interfaces, loopback last."""
    if (
        address.family not in ("ip4", "ip6")
        or not ipaddress.ip_address(address.host).is_unspecified
    ):
        return (address,)
    family = socket.AF_INET if address.family == "ip4" else socket.AF_INET6
    hosts = [
        interface.address.split("%")[0]
        for interfaces in psutil.net_if_addrs().values()
        for interface in interfaces
        if interface.family == family
    ]
    usable = [host for host in dict.fromkeys(hosts) if not ipaddress.ip_address(host).is_link_local]
    usable.sort(key=lambda host: ipaddress.ip_address(host).is_loopback)
    return tuple(Address(address.family, host, address.port, address.peer_id) for host in usable)


class AddressBook:
    """Where peers were said to be reached: at most 8 addresses of 256 peers.

    When it is full, the newest are kept, and those that were reached before all that is hearsay.
    """

    def __init__(self, own_peer_id: str) -> None:
        self._own_peer_id = own_peer_id
        self._addrs: OrderedDict[str, tuple[Address, ...]] = OrderedDict()
        self._trusted: dict[str, tuple[Address, ...]] = {}
        self._reached: set[str] = set()

    def mark_reached(self, peer_id: str) -> None:
        """Note that a peer was connected to us: it is there, whatever strangers say of others."""
        if peer_id in self._addrs:
            self._reached.add(peer_id)

    def trust(self, address: Address) -> None:
        """Keep an address that the user gave: it is never pushed out by what strangers say."""
        if address.peer_id is None or address.peer_id == self._own_peer_id:
            return
        known = self._trusted.get(address.peer_id, ())
        self._trusted[address.peer_id] = tuple(dict.fromkeys((address, *known)))[
            :MAX_ADDRS_PER_PEER
        ]

    def remember(self, peer_id: str, addrs: Sequence[str], *, keep: Iterable[str] = ()) -> int:
        """Note addresses that a stranger gave for `peer_id`; bad ones are left out without a word.

        Args:
            peer_id: Whose they are said to be; the handshake proves it when they are dialled.
            addrs: Addresses as text, with or without /p2p/.
            keep: Peers not to forget when the book is full (those connected now).

        Returns:
            How many addresses were taken that were not known before.
        """
        if not is_peer_id(peer_id) or peer_id == self._own_peer_id:
            return 0
        taken = []
        for text in addrs[:MAX_ADDRS_PER_PEER]:
            try:
                address = parse_address(text)
            except AddressError:
                continue
            if address.peer_id in (None, peer_id) and is_dialable_from_stranger(address):
                taken.append(Address(address.family, address.host, address.port, peer_id))
        known = self._addrs.pop(peer_id, ())
        if taken or known:
            self._addrs[peer_id] = tuple(dict.fromkeys((*taken, *known)))[:MAX_ADDRS_PER_PEER]
            self._forget_oldest(frozenset(keep))
        return len(set(taken).difference(known))

    def _forget_oldest(self, keep: frozenset[str]) -> None:
        while len(self._addrs) > MAX_KNOWN_PEERS:
            unreached = (p for p in self._addrs if p not in keep and p not in self._reached)
            others = (p for p in self._addrs if p not in keep)
            self.forget(next(unreached, None) or next(others, None) or next(iter(self._addrs)))

    def forget(self, peer_id: str) -> None:
        """Drop what strangers said about `peer_id`."""
        self._addrs.pop(peer_id, None)
        self._reached.discard(peer_id)

    def peers(self) -> tuple[str, ...]:
        """List the peers with an address, those that the user gave first."""
        return tuple(dict.fromkeys((*self._trusted, *self._addrs)))

    def addresses_of(self, peer_id: str) -> tuple[Address, ...]:
        """List the addresses of `peer_id`, those that the user gave first."""
        return tuple(
            dict.fromkeys((*self._trusted.get(peer_id, ()), *self._addrs.get(peer_id, ())))
        )
