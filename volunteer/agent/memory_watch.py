"""Has the agent begin anew where its own memory has grown past the owner's limit.

Runs in: agent. It happens at most once an hour: what grows faster than that is a fault that a
restart does not mend, and is told instead.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import psutil
import trio

log = logging.getLogger(__name__)
LOOK_EVERY_S = 5.0
LOOKS_ABOVE = 3
"""In a row: a peak passes."""
LEAST_BETWEEN_S = 3600.0


def read_own_memory() -> int:
    """Return the bytes of memory that this process holds."""
    return int(psutil.Process().memory_info().rss)


class MemoryWatch:
    """Looks at the agent's memory."""

    def __init__(
        self,
        limit_bytes: int,
        last_restart_at_s: float | None,
        now_s: Callable[[], float],
        restart: Callable[[int], None],
        read_memory: Callable[[], int] = read_own_memory,
    ) -> None:
        """Watch for `limit_bytes`; 0: never.

        Args:
            limit_bytes: what the owner allows.
            last_restart_at_s: when this process last began anew for that; None: it has not.
            now_s: the agent's clock.
            restart: called once, with the bytes held, when it should begin anew.
            read_memory: returns the bytes held now.
        """
        self._limit_bytes = limit_bytes
        self._last_restart_at_s = last_restart_at_s
        self._now_s = now_s
        self._restart = restart
        self._read_memory = read_memory
        self._num_above = 0
        self._above_bytes = 0

    def note(self) -> str:
        """Return why nothing is done about too much memory, as a sentence; mostly nothing."""
        if self._num_above < LOOKS_ABOVE or self._last_restart_at_s is None:
            return ""
        ago_min = round((self._now_s() - self._last_restart_at_s) / 60)
        return (
            f"{self._above_bytes / 1e6:.0f} MB, above {self._limit_bytes / 1e6:.0f} MB"
            f" (`agent_memory_limit_bytes`); the agent began anew {ago_min} min ago,"
            f" and does so once in {LEAST_BETWEEN_S / 60:.0f} min at most"
        )

    async def run(self) -> None:
        """Look now and then, until it should begin anew."""
        while not self.look():  # noqa: ASYNC110 -- memory tells nobody that it grows
            await trio.sleep(LOOK_EVERY_S)  # noqa: TID251 - a period

    def look(self) -> bool:
        """Look once; return whether the agent begins anew."""
        held_bytes = self._read_memory()
        if not self._limit_bytes or held_bytes <= self._limit_bytes:
            self._num_above = 0
            return False
        self._above_bytes = held_bytes
        self._num_above += 1
        if self._num_above < LOOKS_ABOVE:
            return False
        last = self._last_restart_at_s
        if last is not None and self._now_s() - last < LEAST_BETWEEN_S:
            if self._num_above == LOOKS_ABOVE:
                log.warning("memory: %s", self.note())
            return False
        log.warning(
            "beginning anew: memory=%d limit=%d (`agent_memory_limit_bytes`)",
            held_bytes,
            self._limit_bytes,
        )
        self._restart(held_bytes)
        return True
