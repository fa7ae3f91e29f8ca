"""Staying connected to whom we know. Runs in: agent.

Bootstrap peers come first, then those that were remembered; who cannot be reached is tried again
after a pause that doubles, with jitter, so that a swarm whose hub comes back does not dial it all
at once.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from p2p.addresses import MAX_KNOWN_PEERS, Address
from p2p.errors import PeerUnreachableError, RequestTimeoutError
from p2p.host import Host
from p2p.swarm_types import SwarmConfig

MAX_DIALS_AT_ONCE: Final = 4
RETRY_SPREAD_S: Final = 2.0  # when all are tried anew, so that a hub is not dialled all at once
STAGGER_S: Final = 0.3  # before a peer's next address is dialled too
_JITTER: Final = secrets.SystemRandom()


class Addresses(Protocol):
    """Where peers are said to be reached: an address book, or several."""

    def peers(self) -> tuple[str, ...]:
        """List the peers with an address, the most wanted first."""

    def addresses_of(self, peer_id: str) -> tuple[Address, ...]:
        """List the addresses of a peer, the likeliest first."""


@dataclass(slots=True)
class _Dial:
    """A peer that is being dialled."""

    ended: trio.Event = field(default_factory=trio.Event)
    has_answered: bool = False


class Dialer:
    """Dials the peers of an address book."""

    def __init__(
        self,
        book: Addresses,
        config: SwarmConfig,
        get_host: Callable[[], Host | None],
        is_banned: Callable[[str], bool],
        is_passed_over: Callable[[str], bool] = lambda _peer_id: False,
    ) -> None:
        """Dial those in `book`, but for the banned, and for now those that are passed over."""
        self._is_passed_over = is_passed_over
        self._book = book
        self._config = config
        self._get_host = get_host
        self._is_banned = is_banned
        self._failures: dict[str, int] = {}
        self._try_again_at: dict[str, float] = {}
        self._ongoing: dict[str, _Dial] = {}
        self._wake = trio.Event()

    def look_now(self, peer_id: str | None = None) -> None:
        """Do not wait for the next look; what we held against `peer_id` is forgotten."""
        if peer_id is not None:
            self._failures.pop(peer_id, None)
            self._try_again_at.pop(peer_id, None)
        self._wake.set()
        self._wake = trio.Event()

    def forget_failures(self) -> None:
        """Try everybody again soon, whatever failed before."""
        now = trio.current_time()
        self._failures.clear()
        self._try_again_at = {
            peer_id: now + _JITTER.uniform(0.0, RETRY_SPREAD_S) for peer_id in self._book.peers()
        }
        self.look_now()

    async def run(self) -> None:
        """Look again and again who should be connected."""
        async with trio.open_nursery() as nursery:
            while True:
                for peer_id in self._due():
                    nursery.start_soon(self._try, peer_id)
                with trio.move_on_after(self._config.redial_every_s * _JITTER.uniform(0.8, 1.2)):
                    await self._wake.wait()

    def _due(self) -> list[str]:
        host = self._get_host()
        if host is None:
            return []
        now = trio.current_time()
        self._forget_the_forgotten()
        room = min(
            MAX_DIALS_AT_ONCE - len(self._ongoing),
            self._config.max_connections - host.num_connections(),
        )
        due = (
            peer_id
            for peer_id in self._book.peers()
            if peer_id not in self._ongoing
            and self._try_again_at.get(peer_id, 0.0) <= now
            and not self._is_banned(peer_id)
            and not self._is_passed_over(peer_id)
            and not host.is_connected(peer_id)
        )
        return [peer_id for _, peer_id in zip(range(room), due, strict=False)]

    def _forget_the_forgotten(self) -> None:
        """Strangers may name ever new peers: keep no notes of those whom the book has dropped."""
        if len(self._failures) + len(self._try_again_at) > 4 * MAX_KNOWN_PEERS:
            known = set(self._book.peers())
            for notes in (self._failures, self._try_again_at):
                for peer_id in [peer for peer in notes if peer not in known]:
                    del notes[peer_id]

    async def _try(self, peer_id: str) -> None:
        try:
            await self.connect(peer_id)
        except PeerUnreachableError:
            failures = self._failures[peer_id] = self._failures.get(peer_id, 0) + 1
            pause_s = self._config.redial_every_s * 2.0 ** min(failures - 1, 20)
            pause_s = min(pause_s, self._config.redial_at_most_every_s) * _JITTER.uniform(0.5, 1.0)
            self._try_again_at[peer_id] = trio.current_time() + pause_s
        else:
            self._failures.pop(peer_id, None)

    async def connect(self, peer_id: str) -> Host:
        """Connect to a peer at one of its known addresses, unless it is connected.

        Returns:
            The host that holds the connection.

        Raises:
            PeerUnreachableError: No address is known, or nobody answered at any.
        """
        while True:
            host = self._get_host()
            if host is None:
                raise PeerUnreachableError("the network layer is being started again")
            if self._is_banned(peer_id):
                raise PeerUnreachableError(f"peer {peer_id} is banned")
            if host.is_connected(peer_id):
                return host
            ongoing = self._ongoing.get(peer_id)
            if ongoing is None:
                break
            await ongoing.ended.wait()
            # One that was connected and disconnected while it was ending is dialled anew.
            if not host.is_connected(peer_id) and not ongoing.has_answered:
                raise PeerUnreachableError(f"peer {peer_id} did not answer at any known address")
        await self._dial_any(host, peer_id)
        return host

    async def connect_within(self, peer_id: str, timeout_s: float) -> Host:
        """Connect as `connect` does.

        Raises:
            PeerUnreachableError: As `connect`.
            RequestTimeoutError: It took longer than `timeout_s`.
        """
        try:
            with trio.fail_after(timeout_s):
                return await self.connect(peer_id)
        except trio.TooSlowError as error:
            raise RequestTimeoutError(
                f"no connection to peer {peer_id} within {timeout_s:g} s"
            ) from error

    async def _dial_any(self, host: Host, peer_id: str) -> None:
        addresses = self._book.addresses_of(peer_id)
        if not addresses:
            raise PeerUnreachableError(f"no address of peer {peer_id} is known")
        dial = self._ongoing[peer_id] = _Dial()
        reasons: list[str] = []
        try:
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    has_failed = trio.Event()
                    nursery.start_soon(
                        self._dial_one, host, address, reasons, has_failed, nursery.cancel_scope
                    )
                    with trio.move_on_after(STAGGER_S):
                        await has_failed.wait()
        finally:
            del self._ongoing[peer_id]
            dial.has_answered = len(reasons) < len(addresses)
            dial.ended.set()
        if not host.is_connected(peer_id):
            raise PeerUnreachableError("; ".join(reasons) or f"peer {peer_id} hung up")

    async def _dial_one(
        self,
        host: Host,
        address: Address,
        reasons: list[str],
        has_failed: trio.Event,
        others: trio.CancelScope,
    ) -> None:
        try:
            await host.dial(address, timeout_s=self._config.dial_timeout_s)
        except PeerUnreachableError as error:
            reasons.append(str(error))
            has_failed.set()
        else:
            others.cancel()
