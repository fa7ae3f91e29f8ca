"""Refusing peers: by a ban that was asked for, or because they break the rules. Runs in: agent."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import trio

from p2p.bans import BanList
from p2p.conduct import Conduct, Misdeed
from p2p.contain import call_all
from p2p.identity import is_peer_id
from p2p.swarm_types import Ban, SwarmConfig, Tally

Accept = Callable[[str, bytes], Awaitable[bool]]
"""Decides about a gossiped message, by author and payload."""

_log = logging.getLogger("p2p.refusals")


class Refusals:
    """Who is refused, and what leads to it."""

    def __init__(
        self, own_peer_id: str, config: SwarmConfig, tally: Tally, drop: Callable[[str], None]
    ) -> None:
        """Start from the bans of `config`; `drop` ends all dealings with a peer."""
        self._own_peer_id = own_peer_id
        self._tally = tally
        self._drop = drop
        self._bans = BanList(config.banned, ban_s=config.ban_s, utc_now=time.time)
        self._conduct = Conduct(self._refuse_for_a_time)
        self.when_banned: list[Callable[[str, Ban], None]] = []
        """Called with peer id and ban when a peer is refused."""
        self.is_banned = self._bans.is_banned
        self.current = self._bans.current

    def ban(self, peer_id: str, reason: str, *, ban_s: float | None) -> None:
        """Refuse a peer for so many seconds, or for good."""
        if is_peer_id(peer_id) and peer_id != self._own_peer_id:
            self._refuse(peer_id, self._bans.ban(peer_id, reason, ban_s=ban_s))

    def unless_banned(self, accept: Accept) -> Accept:
        """Have a topic refuse what banned peers wrote, and ask `accept` about the rest."""

        async def accept_unless_banned(author: str, payload: bytes) -> bool:
            return not self.is_banned(author) and await accept(author, payload)

        return accept_unless_banned

    def note_misdeed(self, peer_id: str, misdeed: Misdeed, times: float = 1.0) -> None:
        """Note what a peer did that it should not."""
        self._tally.misdeeds += round(times)
        self._conduct.note(peer_id, misdeed, trio.current_time(), times)

    def _refuse_for_a_time(self, peer_id: str, reason: str) -> None:
        if not self.is_banned(peer_id):
            self._refuse(peer_id, self._bans.ban_again(peer_id, reason))

    def _refuse(self, peer_id: str, ban: Ban) -> None:
        _log.warning("banned peer=%s reason=%s until_utc=%s", peer_id, ban.reason, ban.until_utc)
        self._drop(peer_id)
        self._tally.failed_handlers += call_all("on_banned", self.when_banned, peer_id, ban)
