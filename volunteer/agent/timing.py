"""How long an exchange takes here, and what follows from it for the round's timing.

Runs in: agent. Pure. ROUNDS.md, Parameters.
"""

from __future__ import annotations

import statistics
from collections import deque

from volunteer.run import RoundSpec

GRACE_FRACTION = 0.05
EXCHANGES_PER_GRACE = 4
EXCHANGES_PER_FAILOVER = 12
SYNC_FRACTION = 0.03
MAX_SYNC_S = 18.0
MIN_SYNC_S = 0.5


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
