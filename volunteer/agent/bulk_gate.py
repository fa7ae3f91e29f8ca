"""Whether blobs and shared states may be sent and fetched just now.

Runs in: agent. They are nearly all bytes that a run moves; the control traffic of a few hundred
bytes a second goes on, so that this member stays known and hears what the swarm agrees on. Whoever
has a reason against it (the hours of the network, a metered connection) holds the gate shut.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

log = logging.getLogger(__name__)


class BulkGate:
    """Shut while anybody holds it."""

    def __init__(self) -> None:
        """Begin open."""
        self._reasons: dict[str, str] = {}
        self._fetching_only: set[str] = set()
        self._open = trio.Event()
        self._open.set()
        self._scopes: set[trio.CancelScope] = set()

    @property
    def reason(self) -> str:
        """Why it is shut, as the end of a sentence; empty while it is open."""
        return next(iter(self._reasons.values()), "")

    @property
    def may_serve(self) -> bool:
        """Whether others may be given what is here."""
        return self._fetching_only >= self._reasons.keys()

    def hold(self, holder: str, reason: str, *, is_fetching_only: bool = False) -> None:
        """Hold it shut, or let go; what is under way stops at once.

        Args:
            holder: who, always by the same name.
            reason: why; empty lets go.
            is_fetching_only: whether it has nothing against giving others what is here.
        """
        before = self.reason
        if reason:
            self._reasons[holder] = reason
            (self._fetching_only.add if is_fetching_only else self._fetching_only.discard)(holder)
        else:
            self._reasons.pop(holder, None)
        if self.reason and not before:
            log.info("no blobs are fetched: %s", self.reason)
            self._open = trio.Event()
            for scope in self._scopes:
                scope.cancel()
        elif before and not self.reason:
            log.info("blobs are fetched again")
            self._open.set()

    async def run(self, transfer: Callable[[], Awaitable[None]]) -> None:
        """Do `transfer` while the gate is open; where it is shut meanwhile, again once it opens.

        Args:
            transfer: keeps what has come when it is cancelled.

        Cancellation: as that of `transfer`.
        """
        while True:
            await self._open.wait()
            with trio.CancelScope() as scope:
                self._scopes.add(scope)
                try:
                    await transfer()
                    return
                finally:
                    self._scopes.discard(scope)
