"""Bytes by purpose: from the swarm's counters into the ledger.

Runs in: agent.
"""

from __future__ import annotations

from collections.abc import Mapping

import trio

from p2p.swarm import Swarm
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.stats.ledger import Ledger

FLUSH_EVERY_S = 60.0


class TrafficMeter:
    """Accounts every byte to the purpose it was sent or received for."""

    def __init__(self, swarm: Swarm, keeper: Bookkeeper, ledger: Ledger) -> None:
        """Read the swarm's counters; `run` does it every minute."""
        self._swarm = swarm
        self._keeper = keeper
        self._ledger = ledger
        self._sent: Mapping[str, int] = {}
        self._received: Mapping[str, int] = {}

    def purpose_of(self, blob_id: str) -> str:
        """Return what a blob that a peer asks for is accounted under."""
        return "blobs"

    async def run(self) -> None:
        """Write what has come together, every minute."""
        while True:
            await trio.sleep(FLUSH_EVERY_S)  # noqa: TID251 - a period
            await self.flush()

    async def flush(self) -> None:
        """Write what has come together since the last time."""
        statistics = self._swarm.statistics()
        sent, received = statistics.sent_bytes_by_purpose, statistics.received_bytes_by_purpose
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
