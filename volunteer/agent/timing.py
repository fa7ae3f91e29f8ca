"""How long an exchange takes here, and what follows from it for the round's timing.

Runs in: agent. Pure. ROUNDS.md, Parameters.
"""

from __future__ import annotations

import statistics
from collections import deque

from volunteer.rounds.machine import Machine
from volunteer.run import RoundSpec

GRACE_FRACTION = 0.05
EXCHANGES_PER_GRACE = 4
EXCHANGES_PER_FAILOVER = 12
SYNC_FRACTION = 0.03
MAX_SYNC_S = 18.0
MIN_SYNC_S = 0.5


HEARTBEAT_FLOOR_S = 2.0
HEARTBEATS_PER_ROUND = 4
"""Of a swarm of two to four together: by these and the pings it is known who is there."""
MEMBERS_HEARD = 32
"""From so many on, a round has so many heartbeats of all together, as it has contributions."""
SYNCS_AFTER_MOVE = 1.5
PINGS_PER_ROUND = 30


def heartbeat_period_s(round_s: float, num_others: int) -> float:
    """Return the seconds between two heartbeats of one member.

    What all send together grows with the blobs of a round, and stays far below them: each copy of a
    heartbeat is 0.8 kB, and gossip brings three or four of them to everybody.
    """
    num_members = num_others + 1
    rounds = max(min(1.0, num_members / HEARTBEATS_PER_ROUND), num_members / MEMBERS_HEARD)
    return max(HEARTBEAT_FLOOR_S, float(num_others), rounds * round_s)


def ping_every_s(round_s: float) -> float:
    """Return the seconds of silence after which a neighbour is asked if it is there: 5 to 20."""
    return min(20.0, max(5.0, round_s / PINGS_PER_ROUND))


def discover_every_s(round_s: float) -> float:
    """Return the seconds between two searches for peers while there are some: 60 to 600."""
    return min(600.0, max(60.0, round_s))


def is_settled(machine: Machine, now_s: float, sync_s: float) -> bool:
    """Return whether nothing is to be expected before the round is closed.

    A new tip is offered to others for some periods of a sync: they may not have heard of it.
    """
    if machine.tip is None or machine.closed_at_s is not None or machine.known.waiting:
        return False
    is_behind = machine.known.highest_height > machine.known.facts[machine.tip].height
    return not is_behind and now_s - machine.applied_at_s > SYNCS_AFTER_MOVE * sync_s


class ExchangeClock:
    """Measures the exchange time x: from a contribution's notice to its blob, validated."""

    def __init__(self, rounds: RoundSpec) -> None:
        """Start without a measurement."""
        self._rounds = rounds
        self._exchanges_s: deque[float] = deque(maxlen=32)

    def note_exchange(self, duration_s: float) -> None:
        """Take in one measurement, in seconds."""
        self._exchanges_s.append(duration_s)

    @property
    def exchange_s(self) -> float:
        """The median x, in seconds; 0 before the first measurement."""
        return statistics.median(self._exchanges_s) if self._exchanges_s else 0.0

    @property
    def grace_s(self) -> float:
        """max(4 x, 5 % of the round, the RunSpec's floor), at most half a round."""
        grace_s = max(
            EXCHANGES_PER_GRACE * self.exchange_s,
            GRACE_FRACTION * self._rounds.round_s,
            self._rounds.min_grace_s,
        )
        return min(grace_s, max(0.5 * self._rounds.round_s, self._rounds.min_grace_s))

    @property
    def failover_s(self) -> float:
        """At least the grace, and about 12 exchanges, at most a round."""
        failover_s = max(self.grace_s, EXCHANGES_PER_FAILOVER * self.exchange_s)
        return min(failover_s, max(self._rounds.round_s, self.grace_s))

    @property
    def sync_s(self) -> float:
        """Seconds between two syncs: 3 % of the round, 0.5 to 18."""
        return min(MAX_SYNC_S, max(MIN_SYNC_S, SYNC_FRACTION * self._rounds.round_s))
