"""Finding members of our namespace, by every way there is. Runs in: agent.

Neighbours are asked (p2p.peer_exchange) when they connect and now and then; the local network is
listened to (p2p.mdns); the table of all peers is asked (p2p.dht). What is found goes to the address
book, and the dialer does the rest. Without any neighbour for a minute, everybody known is tried
again, whatever failed before.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Final

import trio

from p2p.addresses import Address, AddressBook
from p2p.conduct import Misdeed
from p2p.contain import contain
from p2p.dht import Dht
from p2p.dialer import Dialer
from p2p.host import Host
from p2p.mdns import Mdns
from p2p.members import Members
from p2p.peer_exchange import PeerExchange, tag_of
from p2p.requests import Requests
from p2p.swarm_types import SwarmConfig, Tally

MAX_ASKED_AT_ONCE: Final = 4
FIRST_LOOK_S: Final = 2.0  # after a first neighbour: it has told us where it listens by then

_log = logging.getLogger("p2p.discovery")
_CHANCE: Final = secrets.SystemRandom()


class Discovery:
    """Looks for peers while the swarm is open."""

    def __init__(
        self,
        config: SwarmConfig,
        own_peer_id: str,
        *,
        own_addresses: Callable[[], Sequence[Address]],
        get_host: Callable[[], Host | None],
        book: AddressBook,
        dialer: Dialer,
        requests: Requests,
        tally: Tally,
        remember: Callable[[str, Sequence[str]], int],
        is_banned: Callable[[str], bool],
        note_misdeed: Callable[[str, Misdeed], None],
    ) -> None:
        """Look for those with the namespace of `config`.

        Args:
            config: What to look for, how, and how often.
            own_peer_id: Who we are.
            own_addresses: Where we listen now.
            get_host: The host that is up.
            book: Whom we know.
            dialer: What connects to them.
            requests: What carries questions to neighbours.
            tally: Where what was found is counted.
            remember: Puts a peer and its addresses into the book, to be dialled; gives how many
                of them are new.
            is_banned: Whether a peer is refused.
            note_misdeed: Told of who breaks the rules.
        """
        self._config = config
        self._get_host = get_host
        self._dialer = dialer
        self._tally = tally
        self._remember = remember
        self._members = Members()
        self._tag = tag_of(config.namespace) if config.namespace else None
        self._is_connected = False
        self._changed = trio.Event()
        self._asking = trio.CapacityLimiter(MAX_ASKED_AT_ONCE)
        self._nursery: trio.Nursery | None = None
        self._exchange = PeerExchange(
            requests=requests,
            members=self._members,
            own_peer_id=own_peer_id,
            own_tag=self._tag,
            own_addresses=own_addresses,
            found=lambda peer_id, addresses: self._found("exchange", peer_id, addresses),
            note_misdeed=note_misdeed,
        )
        self._exchange.serve()
        self._mdns: Mdns | None = None
        self._dht: Dht | None = None
        if self._tag is None:
            return
        if config.mdns:
            self._mdns = Mdns(
                self._tag,
                own_peer_id,
                own_addresses,
                lambda peer_id, addresses: self._found("mdns", peer_id, addresses),
            )
        if config.dht:
            self._dht = Dht(
                tag=self._tag,
                own_peer_id=own_peer_id,
                own_addresses=own_addresses,
                config=config,
                members=self._members,
                book=book,
                get_host=get_host,
                is_banned=is_banned,
                found=lambda peer_id, addresses: self._found("dht", peer_id, addresses),
                note_misdeed=note_misdeed,
                tally=tally,
            )

    def table_size(self) -> int:
        """Count the peers in the routing table of the DHT."""
        return 0 if self._dht is None else self._dht.table_size()

    def forget(self, peer_id: str) -> None:
        """Drop what a peer said."""
        self._members.forget(peer_id)

    # -- what happens to connections

    def attach(self, host: Host, nursery: trio.Nursery) -> None:
        """Use a new host, with tasks in `nursery`, which ends with it."""
        self._exchange.attach(host)
        if self._dht is not None:
            nursery.start_soon(self._dht.run, host)

    def detach(self) -> None:
        """Note that the host is gone."""
        self._exchange.attach(None)

    def on_connected(self, peer_id: str) -> None:
        """Ask a new neighbour, and have it learn where we listen."""
        self._note_connected(True)
        if self._nursery is not None and self._tag is not None:
            self._nursery.start_soon(self._ask, peer_id)

    def on_lost(self, num_left: int) -> None:
        """Note that a neighbour is gone, and how many are left."""
        self._note_connected(num_left > 0)

    def _note_connected(self, is_connected: bool) -> None:
        if is_connected != self._is_connected:
            self._is_connected = is_connected
            self._changed.set()
            self._changed = trio.Event()

    def _found(self, way: str, peer_id: str, addresses: Sequence[Address]) -> None:
        num_new = self._remember(peer_id, [*map(str, addresses)])
        if num_new:
            self._tally.found[way] += 1
            _log.debug("found peer=%s by=%s addrs=%d", peer_id, way, num_new)

    # -- what is done now and then

    async def run(self) -> None:
        """Look for peers until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._watch_loneliness)
            if self._tag is not None:
                nursery.start_soon(self._look_often)
            if self._mdns is not None:
                nursery.start_soon(self._run_mdns, self._mdns)

    async def _run_mdns(self, mdns: Mdns) -> None:
        while True:
            with contain("mdns"):
                await mdns.run()
            await trio.sleep(self._config.alone_after_s)  # noqa: TID251 -- backoff

    async def _look_often(self) -> None:
        """Look soon after the first neighbour, then every minute; more often while alone."""
        while True:
            was_connected = self._is_connected
            pause_s = (
                self._config.discover_every_s
                if was_connected
                else self._config.discover_alone_every_s
            )
            with trio.move_on_after(pause_s * _CHANCE.uniform(0.8, 1.2)):
                await self._changed.wait()
            if self._is_connected and not was_connected:
                first_look_s = min(FIRST_LOOK_S, self._config.discover_alone_every_s)
                await trio.sleep(first_look_s * _CHANCE.uniform(0.5, 1.0))  # noqa: TID251 -- see above
            await self._look()

    async def _look(self) -> None:
        """Look once, in every way."""
        if self._mdns is not None:
            self._mdns.look_again()
        host = self._get_host()
        neighbours = [] if host is None else host.peers()
        if neighbours:
            await self._ask(_CHANCE.choice(neighbours).peer_id)
        if self._dht is not None:
            await self._dht.look()

    async def _ask(self, peer_id: str) -> None:
        with contain("peer exchange", peer_id=peer_id):
            async with self._asking:
                await self._exchange.ask(peer_id)

    async def _watch_loneliness(self) -> None:
        """Start over whenever nobody has been connected for a minute. Logged once each time."""
        is_told = False
        while True:
            with trio.move_on_after(self._config.alone_after_s) as scope:
                await self._changed.wait()
            if self._is_connected:
                is_told = False
            elif scope.cancelled_caught:
                _log.log(
                    logging.DEBUG if is_told else logging.INFO,
                    "no peer for %g s: trying everybody known again",
                    self._config.alone_after_s,
                )
                is_told = True
                self._dialer.forget_failures()
                if self._mdns is not None:
                    self._mdns.look_again()
