"""Fetching a shared state: one at a time, while contributing, from whoever has it.

Runs in: agent. It is 8 bytes a parameter, so it may take an hour on a home line: it stops with a
pause and goes on after it, is given up only when nobody gives anything more, and what has come is
on the disk for the next start (p2p/partial_blob.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from p2p.blobstore import BlobStore
from p2p.flow import Priority
from p2p.swarm import Swarm
from volunteer.agent.aggregator_service import AggregatorService
from volunteer.agent.bulk_gate import BulkGate
from volunteer.messages import VerifyState

STALL_S = 120.0
"""Without a new chunk, when nobody is there; something else is fetched then."""
GONE_S = 10.0
"""The same when those who are there all say that they have moved on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateProgress:
    """How far the fetch of a state is."""

    round_index: int
    held_bytes: int
    """On this disk and checked against the hash."""
    total_bytes: int
    bytes_per_s: float
    num_peers: int
    """That are giving it."""
    is_complete: bool
    """All is here, and the file is being looked through as a whole."""


class StateFetch:
    """The state that one module is waiting for."""

    def __init__(
        self,
        store: BlobStore,
        swarm: Swarm,
        aggregator: AggregatorService,
        state_bytes: int,
        gate: BulkGate | None = None,
    ) -> None:
        """Fetch into `store` while `gate` is open; a state has `state_bytes`."""
        self._gate = gate or BulkGate()
        self._store = store
        self._swarm = swarm
        self._aggregator = aggregator
        self._state_bytes = state_bytes
        self._wanted: tuple[str, int] | None = None
        self._allowed = trio.Event()
        self._allowed.set()
        self._scope = trio.CancelScope()

    def set_allowed(self, is_allowed: bool) -> None:
        """Go on, or leave machine and line alone until it may go on."""
        if is_allowed:
            self._allowed.set()
        elif self._allowed.is_set():
            self._allowed = trio.Event()
            self._scope.cancel()

    async def fetch(
        self, state_hash: str, round_index: int, providers: Callable[[], Sequence[str]]
    ) -> None:
        """Have the state in the store, looked through.

        Args:
            state_hash: its blob id.
            round_index: height of its commit, for what the owner is told.
            providers: who may have it.

        Raises:
            P2PError: nobody has it, or there is no room.
            AggregatorLostError: it ended meanwhile.
            AggregatorRefusedError: the file is no state of this run.
        """
        self._wanted = (state_hash, round_index)
        try:
            while True:
                await self._allowed.wait()
                with trio.CancelScope() as self._scope:
                    await self._fetch_once(state_hash, providers)
                    return
        finally:
            self._wanted = None

    async def _fetch_once(self, state_hash: str, providers: Callable[[], Sequence[str]]) -> None:
        if not self._store.has(state_hash):
            await self._gate.run(
                lambda: self._swarm.fetch_blob(
                    state_hash,
                    max_bytes=self._state_bytes,
                    providers=providers,
                    store=self._store,
                    purpose="states",
                    deadline_s=math.inf,
                    stall_s=STALL_S,
                    gone_s=GONE_S,
                    priority=Priority.BULK,
                )
            )
        # The hash says which bytes; that they are a state of this run's shape is for us to see.
        await self._aggregator.ask(lambda i: VerifyState(request_id=i, state_hash=state_hash))

    def progress(self) -> StateProgress | None:
        """Say how far it is; None while nothing is fetched."""
        if self._wanted is None:
            return None
        state_hash, round_index = self._wanted
        views = (one for one in self._swarm.downloads() if one.blob_id == state_hash)
        view = next(views, None)
        is_complete = self._store.has(state_hash)
        total_bytes = (view.size_bytes if view else None) or self._state_bytes
        held_bytes = view.held_bytes if view else 0
        return StateProgress(
            round_index=round_index,
            held_bytes=total_bytes if is_complete else held_bytes,
            total_bytes=total_bytes,
            bytes_per_s=view.bytes_per_s if view else 0.0,
            num_peers=view.num_peers if view else 0,
            is_complete=is_complete,
        )
