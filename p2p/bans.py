"""Whom we refuse, why, and until when. Runs in: agent. Pure: the clock comes in.

A ban for breaking the network's rules ends after a time that doubles with each one; a ban that the
round protocol asks for (with a proof in hand) has no end. Both are to be kept by the caller and
given back at the next start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final

from p2p.swarm_types import Ban

MAX_BAN_S: Final = 7 * 86_400.0
MAX_TIMED_BANS: Final = 4096  # peer ids cost nothing; the ban that ends first makes room


class BanList:
    """The refused peers."""

    def __init__(
        self, banned: Mapping[str, Ban], *, ban_s: float, utc_now: Callable[[], float]
    ) -> None:
        self._ban_s = ban_s
        self._utc_now = utc_now
        self._for_good: dict[str, Ban] = {}
        self._timed: dict[str, Ban] = {}
        self._num_bans: OrderedDict[str, int] = OrderedDict()
        for peer_id, (reason, until_utc) in banned.items():
            self._keep(peer_id, Ban(reason, until_utc))

    def is_banned(self, peer_id: str) -> bool:
        """Tell whether `peer_id` is refused now."""
        if peer_id in self._for_good:
            return True
        ban = self._timed.get(peer_id)
        if ban is None or ban.until_utc is None:
            return False
        if ban.until_utc > self._utc_now():
            return True
        del self._timed[peer_id]
        return False

    def ban(self, peer_id: str, reason: str, *, ban_s: float | None) -> Ban:
        """Refuse a peer for `ban_s` seconds, or for good; never for less than it is refused now."""
        until_utc = None if ban_s is None else self._utc_now() + ban_s
        if until_utc is not None and self.is_banned(peer_id):
            now = self._for_good.get(peer_id) or self._timed[peer_id]
            if now.until_utc is None or now.until_utc >= until_utc:
                return now
        return self._keep(peer_id, Ban(reason, until_utc))

    def ban_again(self, peer_id: str, reason: str) -> Ban:
        """Refuse a peer for a time: twice as long as the last time."""
        count = self._num_bans.pop(peer_id, 0)
        self._num_bans[peer_id] = count + 1
        if len(self._num_bans) > MAX_TIMED_BANS:
            self._num_bans.popitem(last=False)
        return self.ban(peer_id, reason, ban_s=min(self._ban_s * 2.0 ** min(count, 30), MAX_BAN_S))

    def current(self) -> dict[str, Ban]:
        """List the bans that have not ended."""
        timed = {peer: ban for peer, ban in self._timed.items() if self.is_banned_until(ban)}
        return {**timed, **self._for_good}

    def is_banned_until(self, ban: Ban) -> bool:
        """Tell whether a ban has not ended."""
        return ban.until_utc is None or ban.until_utc > self._utc_now()

    def _keep(self, peer_id: str, ban: Ban) -> Ban:
        if ban.until_utc is None:
            self._timed.pop(peer_id, None)
            self._for_good[peer_id] = ban
            return ban
        self._timed[peer_id] = ban
        if len(self._timed) > MAX_TIMED_BANS:
            del self._timed[min(self._timed, key=lambda peer: self._timed[peer].until_utc or 0.0)]
        return ban
