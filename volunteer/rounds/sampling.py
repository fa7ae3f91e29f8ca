"""Seeded sampling of contributions when a commit cannot list all of them.

Runs in: agent, simulation. Pure.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass, field

from blake3 import blake3

OTHERS_PART = 4
"""One place in so many is never kept for the rosters: else who founds a run would fill it."""
LOTS_REMEMBERED = 4096


def sample_contributions(
    eligible: Sequence[str], limit: int, *, seed: str, first: Collection[str] = ()
) -> tuple[str, ...]:
    """Return at most `limit` of `eligible`, sorted.

    The choice is by a hash over the parent commit and the contribution, so that who is left out
    changes from round to round (its work is carried).

    Args:
        eligible: what may be listed.
        limit: how many a commit may list.
        seed: the parent commit.
        first: what has three quarters of the places to itself: votes of the rosters, without
            which nothing becomes final. The others share the rest with what is left of these.
    """
    if len(eligible) <= limit:
        return tuple(sorted(eligible))
    drawn = sorted(eligible, key=lambda i: _lot(seed, i))
    chosen = [i for i in drawn if i in first][: limit - limit // OTHERS_PART]
    rest = [i for i in drawn if i not in chosen]
    return tuple(sorted(chosen + rest[: limit - len(chosen)]))


@functools.lru_cache(LOTS_REMEMBERED)
def _lot(seed: str, contribution_id: str) -> bytes:
    return blake3(f"{seed}/{contribution_id}".encode()).digest()


@dataclass(slots=True)
class Draw:
    """The same choice, kept up to date while contributions come: what to fetch ahead of a commit.

    Without it, every member would fetch all that a swarm announces, of which a commit lists a few.
    """

    seed: str
    limit: int
    _first: list[tuple[bytes, str]] = field(default_factory=list)
    _others: list[tuple[bytes, str]] = field(default_factory=list)

    def __len__(self) -> int:
        """Count what was added."""
        return len(self._first) + len(self._others)

    def ids(self) -> list[str]:
        """Return what was added."""
        return [i for _, i in self._first + self._others]

    def add(self, contribution_id: str, *, is_first: bool) -> None:
        """Let a contribution take part; `is_first` as in `sample_contributions`."""
        lots = self._first if is_first else self._others
        bisect.insort(lots, (_lot(self.seed, contribution_id), contribution_id))

    def chosen(self, out: Set[str]) -> list[str]:
        """Return what would be listed now, leaving `out` out, which cannot be had."""
        first = [lot for lot in self._first if lot[1] not in out]
        others = [lot for lot in self._others if lot[1] not in out]
        kept = self.limit - self.limit // OTHERS_PART
        rest = sorted(first[kept : kept + self.limit] + others[: self.limit])
        chosen = first[:kept]
        return [i for _, i in chosen + rest[: self.limit - len(chosen)]]
