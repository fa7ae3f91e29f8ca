"""Which chunks of a blob are still to be asked for, and of whom. Runs in: agent. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SECOND_ASK_AFTER_S: Final = (
    2.0  # a chunk is asked for elsewhere too when all others are on their way
)


@dataclass(slots=True)
class _InFlight:
    """A chunk that was asked for."""

    asked_at_s: float
    peers: set[str]


class ChunkPlan:
    """The chunks that one download lacks."""

    def __init__(self, missing: Iterable[int]) -> None:
        """Plan for the chunks with these indices, in this order."""
        self._todo = deque(missing)
        self._in_flight: dict[int, _InFlight] = {}

    def has_work_for(self, peer_id: str, now_s: float) -> bool:
        """Tell whether `take` would give a chunk."""
        return bool(self._todo) or self._slow_chunk(peer_id, now_s) is not None

    def take(self, peer_id: str, now_s: float) -> int | None:
        """Choose what to ask `peer_id` for: a new chunk, else one that others are slow with."""
        if self._todo:
            index = self._todo.popleft()
            self._in_flight[index] = _InFlight(now_s, {peer_id})
            return index
        slow = self._slow_chunk(peer_id, now_s)
        if slow is not None:
            self._in_flight[slow].asked_at_s = now_s
            self._in_flight[slow].peers.add(peer_id)
        return slow

    def end(self, index: int) -> None:
        """The chunk is here."""
        self._in_flight.pop(index, None)

    def give_back(self, peer_id: str, index: int) -> bool:
        """`peer_id` will not deliver; tell whether somebody else has to be asked."""
        flight = self._in_flight.get(index)
        if flight is None:
            return False  # another peer delivered it
        flight.peers.discard(peer_id)
        if flight.peers:
            return False
        del self._in_flight[index]
        self._todo.appendleft(index)
        return True

    def _slow_chunk(self, peer_id: str, now_s: float) -> int | None:
        """Find a chunk that others were asked for too long ago."""
        for index, flight in self._in_flight.items():
            if peer_id not in flight.peers and now_s - flight.asked_at_s > SECOND_ASK_AFTER_S:
                return index
        return None
