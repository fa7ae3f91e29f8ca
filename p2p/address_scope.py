"""Who is told which address, and whose word about an address is believed. Runs in: agent. Pure.

Addresses of a home network say something about it and are of no use outside, so they are told only
to those inside. And nobody may send others to dial a machine that is not his own: an address that
the whole internet can reach is believed only of a peer that is seen at it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from enum import IntEnum

from p2p.addresses import Address, is_dialable_from_stranger


class Scope(IntEnum):
    """From how far an address can be reached; a greater number means from less far."""

    GLOBAL = 0
    PRIVATE = 1
    LOOPBACK = 2


def scope_of(host: str) -> Scope:
    """Tell from how far a numeric address can be reached."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if ip.is_loopback:
        return Scope.LOOPBACK
    return Scope.GLOBAL if ip.is_global else Scope.PRIVATE


def addresses_for(asker_host: str, addresses: Iterable[Address]) -> list[Address]:
    """Pick those of somebody's addresses that a peer at `asker_host` may be told."""
    asker_scope = scope_of(asker_host)
    return [
        address
        for address in addresses
        if is_dialable_from_stranger(address) and scope_of(address.host) <= asker_scope
    ]


def believable(seen_host: str, claims: Iterable[Address]) -> list[Address]:
    """Pick those of a peer's claims about its own addresses that are believed.

    Args:
        seen_host: Where the peer's connection comes from.
        claims: What it says.

    Returns:
        First the ports that it claims at the address where it is seen (a router may hide what its
        own interfaces have), then the rest.
    """
    dialable = [claim for claim in claims if is_dialable_from_stranger(claim)]
    family = "ip6" if ":" in seen_host else "ip4"
    seen = [Address(family, seen_host, claim.port, claim.peer_id) for claim in dialable]
    seen_scope = scope_of(seen_host)
    inside = [claim for claim in dialable if Scope.GLOBAL < scope_of(claim.host) <= seen_scope]
    return list(dict.fromkeys((*filter(is_dialable_from_stranger, seen), *inside)))
