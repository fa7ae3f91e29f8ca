"""Bytes by purpose: from the swarm's counters into the ledger.

Runs in: agent.

`contributions` and `states` are what the run is about; all else is control: `records`,
`heartbeats`, `sync` (the round protocol), `discovery` and `dht` (finding peers), and `overhead`,
which is what noise, yamux, gossip's frames, pings and negotiation add to all of them: the bytes of
the sockets, less the payload. What TCP and below add is not seen here, nor is multicast DNS, which
is UDP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

import trio

from p2p.swarm import Swarm
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.rounds.knowledge import Knowledge
from volunteer.stats.ledger import Ledger

FLUSH_EVERY_S: Final = 60.0
OVERHEAD: Final = "overhead"
CONTRIBUTIONS: Final = "contributions"
STATES: Final = "states"
MAX_PURPOSES: Final = 256
"""Blobs whose purpose is remembered: more than are asked for at a time."""


class TrafficMeter:
    """Accounts every byte to the purpose it was sent or received for."""

    def __init__(self, swarm: Swarm, keeper: Bookkeeper, ledger: Ledger, known: Knowledge) -> None:
        """Read the counters of `swarm`, and from `known` what a blob is; `run` does it often."""
        self._swarm = swarm
        self._keeper = keeper
        self._ledger = ledger
        self._known = known
        self._purposes: dict[str, str] = {}
        self._sent: Mapping[str, int] = {}
        self._received: Mapping[str, int] = {}

    def purpose_of(self, blob_id: str) -> str:
        """Return what a blob that a peer asks for is accounted under.

        A peer knows a contribution's blob from its record, which is kept here before the blob is;
        whatever else lies in the store is a state.
        """
        purpose = self._purposes.get(blob_id)
        if purpose is None:
            # The newest are asked for the most, and come last.
            contributions = reversed(self._known.contributions.values())
            is_contribution = any(one.blob_id == blob_id for one in contributions)
            purpose = CONTRIBUTIONS if is_contribution else STATES
            while len(self._purposes) >= MAX_PURPOSES:
                del self._purposes[next(iter(self._purposes))]
            self._purposes[blob_id] = purpose
        return purpose

    def totals(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the bytes sent and received since the agent's start, by purpose."""
        statistics = self._swarm.statistics()
        sent = Counter(statistics.sent_bytes_by_purpose)
        received = Counter(statistics.received_bytes_by_purpose)
        # What is on its way is on one side of the account only: payload is counted before it is
        # written, and after all of it was read. So this goes up and down by a message or a chunk.
        sent[OVERHEAD] = max(0, statistics.wire_sent_bytes - sent.total())
        received[OVERHEAD] = max(0, statistics.wire_received_bytes - received.total())
        return sent, received

    def by_purpose(self) -> dict[str, dict[str, int]]:
        """Return `totals` as `stats` and `status` tell them."""
        sent, received = self.totals()
        return {
            purpose: {"sent": sent.get(purpose, 0), "received": received.get(purpose, 0)}
            for purpose in sorted(sent.keys() | received.keys())
        }

    def total_bytes(self) -> int:
        """Return all bytes since the agent's start, both directions."""
        return sum(sum(each.values()) for each in self.totals())

    def wire_bytes(self) -> int:
        """Return the bytes that crossed sockets since the agent's start, both directions.

        By purpose a chunk counts before it is written, and one that a lost connection cut short
        counts whole: those sums may be larger.
        """
        statistics = self._swarm.statistics()
        return statistics.wire_sent_bytes + statistics.wire_received_bytes

    def written_bytes(self) -> int:
        """Return those of them that are in the books, or on their way there."""
        return sum(self._sent.values()) + sum(self._received.values())

    def unwritten_bytes(self) -> int:
        """Return those of them that are not."""
        return self.total_bytes() - self.written_bytes()

    async def run(self) -> None:
        """Write what has come together, every minute."""
        while True:
            await trio.sleep(FLUSH_EVERY_S)  # noqa: TID251 - a period
            await self.flush()

    async def flush(self) -> None:
        """Write what has come together since the last time."""
        sent, received = self.totals()
        for purpose in sorted(sent.keys() | received.keys()):
            new_sent = sent.get(purpose, 0) - self._sent.get(purpose, 0)
            new_received = received.get(purpose, 0) - self._received.get(purpose, 0)
            if new_sent or new_received:
                self._queue(purpose, new_sent, new_received)
        self._sent, self._received = sent, received
        await trio.lowlevel.checkpoint()

    def _queue(self, purpose: str, sent: int, received: int) -> None:
        ledger = self._ledger
        self._keeper.queue(lambda: ledger.add_bytes(purpose, sent, received))
