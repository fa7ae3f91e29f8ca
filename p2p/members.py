"""Who has said, over a connection, which namespace it belongs to and where it listens.

Runs in: agent. Pure: the clock and randomness come in. Only what a peer said of itself is kept, and
only what is believed of that (p2p/address_scope.py), so that nothing here is hearsay.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from p2p.address_scope import addresses_for
from p2p.addresses import Address

MAX_TAGS: Final = 32
MAX_MEMBERS: Final = 128  # of one tag
FRESH_S: Final = 1800.0  # since a member that is not connected was heard
MAX_SAMPLE: Final = 24
MAX_ADDRS: Final = 4  # of one member, told to others


@dataclass(frozen=True, slots=True)
class _Member:
    addresses: tuple[Address, ...]
    heard_at_s: float


class Members:
    """The members of every namespace that somebody has asked for here."""

    def __init__(self) -> None:
        self._of_tag: OrderedDict[bytes, OrderedDict[str, _Member]] = OrderedDict()

    def note(self, tag: bytes, peer_id: str, addresses: Sequence[Address], now_s: float) -> None:
        """Note that a peer belongs to a namespace and listens at `addresses`."""
        members = self._of_tag.pop(tag, OrderedDict())
        self._of_tag[tag] = members
        members.pop(peer_id, None)
        members[peer_id] = _Member(tuple(addresses[:MAX_ADDRS]), now_s)
        if len(members) > MAX_MEMBERS:
            members.popitem(last=False)
        if len(self._of_tag) > MAX_TAGS:
            self._of_tag.popitem(last=False)

    def forget(self, peer_id: str) -> None:
        """Drop what a peer said."""
        for members in self._of_tag.values():
            members.pop(peer_id, None)

    def addresses_of(self, peer_id: str) -> tuple[Address, ...]:
        """List the addresses of a peer, in whatever namespace."""
        found: dict[Address, None] = {}
        for members in self._of_tag.values():
            if peer_id in members:
                found.update(dict.fromkeys(members[peer_id].addresses))
        return tuple(found)

    def peers(self) -> tuple[str, ...]:
        """List the peers with an address, in whatever namespace."""
        return tuple(
            dict.fromkeys(
                peer_id
                for members in self._of_tag.values()
                for peer_id, member in members.items()
                if member.addresses
            )
        )

    def sample(
        self,
        tag: bytes,
        asker_id: str,
        asker_host: str,
        *,
        now_s: float,
        is_connected: Callable[[str], bool],
        chance: random.Random,
    ) -> list[Address]:
        """Pick members at random for one who asks.

        Args:
            tag: Of which namespace.
            asker_id: Who asks; not part of the answer.
            asker_host: Where it sits, which decides what it is told.
            now_s: Monotonic seconds.
            is_connected: Whether a member is connected to us now.
            chance: Where randomness comes from.

        Returns:
            Addresses with peer ids: at most 4 of each of at most 24 members.
        """
        fresh = [
            (peer_id, member)
            for peer_id, member in self._of_tag.get(tag, {}).items()
            if peer_id != asker_id
            and (is_connected(peer_id) or now_s - member.heard_at_s <= FRESH_S)
        ]
        chosen = chance.sample(fresh, min(len(fresh), MAX_SAMPLE))
        return [
            Address(address.family, address.host, address.port, peer_id)
            for peer_id, member in chosen
            for address in addresses_for(asker_host, member.addresses)
        ]
