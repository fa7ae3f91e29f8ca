"""What peers do that they should not, added up. Runs in: agent. Pure: the clock comes in.

Every misdeed has points; points fade. A peer that collects too many is to be refused for a time.
Each kind of misdeed is logged once for each peer, so that nobody can fill the disk with log.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Final

from p2p.token_buckets import TokenBuckets

POINT_LIMIT: Final = 200.0
POINTS_FADE_PER_S: Final = 2.0  # a message a second that is refused never adds up
MAX_PEERS: Final = 1024
MAX_LOGGED: Final = 4096
WARNINGS_PER_S: Final = 0.1  # of all peers together: peer ids cost nothing
WARNINGS_BURST: Final = 30.0

_log = logging.getLogger("p2p.conduct")


class Misdeed(Enum):
    """What a peer did, its points, and how it is said."""

    GOSSIP_FLOOD = (1.0, "sends more gossip than it may")
    GOSSIP_REFUSED = (1.0, "writes messages that their topic refuses")
    GOSSIP_UNSIGNED = (10.0, "forwards messages whose signature is false")
    GOSSIP_MALFORMED = (50.0, "sends gossip that cannot be read")
    MALFORMED = (20.0, "sends frames that its protocol does not allow")
    TOO_OFTEN = (5.0, "asks more often than it may")
    TOO_MANY_STREAMS = (1.0, "opens more streams than it may")
    WRONG_CHUNK = (50.0, "gives chunks of blobs that are not what their hash says")
    UNREAD_FLOOD = (100.0, "sends more than it was asked for")

    def __init__(self, points: float, sentence: str) -> None:
        self.points = points
        self.sentence = sentence


class Conduct:
    """The points of every peer."""

    def __init__(self, refuse: Callable[[str, str], None]) -> None:
        """Call `refuse` with peer id and reason when a peer has collected too many points."""
        self._refuse = refuse
        self._points: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._logged: OrderedDict[tuple[str, Misdeed], None] = OrderedDict()
        self._warnings = TokenBuckets(per_s=WARNINGS_PER_S, burst=WARNINGS_BURST)

    def note(self, peer_id: str, misdeed: Misdeed, now_s: float, times: float = 1.0) -> None:
        """Note that a peer did something `times` times, at `now_s` (monotonic)."""
        self._log(peer_id, misdeed, now_s)
        points, at_s = self._points.pop(peer_id, (0.0, now_s))
        points = max(0.0, points - (now_s - at_s) * POINTS_FADE_PER_S) + misdeed.points * times
        if points >= POINT_LIMIT:
            self._refuse(peer_id, misdeed.sentence)
            return
        self._points[peer_id] = (points, now_s)
        if len(self._points) > MAX_PEERS:
            self._points.popitem(last=False)

    def _log(self, peer_id: str, misdeed: Misdeed, now_s: float) -> None:
        is_new = (peer_id, misdeed) not in self._logged
        if is_new:
            self._logged[peer_id, misdeed] = None
            if len(self._logged) > MAX_LOGGED:
                self._logged.popitem(last=False)
        is_loud = is_new and self._warnings.take("", now_s) == 0.0
        _log.log(
            logging.WARNING if is_loud else logging.DEBUG,
            "peer=%s misdeed=%s: it %s",
            peer_id,
            misdeed.name,
            misdeed.sentence,
        )
