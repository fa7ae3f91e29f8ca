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
    eligible: Sequence[str],
    limit: int,
    *,
    seed: str,
    first: Collection[str] = (),
    votes: Collection[str] = (),
) -> tuple[str, ...]:
    """Return at most `limit` of `eligible`, sorted.

    The choice is by a hash over the parent commit and the contribution, so that who is left out
    changes from round to round (its work is carried).

    Args:
        eligible: what may be listed.
        limit: how many a commit may list.
        seed: the parent commit.
        first: what has three quarters of the places to itself: what the rosters made, without
            which nothing becomes final. The others share the rest with what is left of these.
        votes: of `first`, the votes for the parent: they take those places before what is late. A
            late vote certifies as well, but only a vote in the next list does so promptly.
    """
    if len(eligible) <= limit:
        return tuple(sorted(eligible))
    drawn = sorted(eligible, key=lambda i: _lot(seed, i))
    # Sorting is stable: the lots decide among the votes, and among the others.
    in_rosters = sorted((i for i in drawn if i in first), key=lambda i: i not in votes)
    chosen = in_rosters[: limit - limit // OTHERS_PART]
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
    ids: set[str] = field(default_factory=set)
    """What takes part."""
    has_changed: bool = True
    """Whether what came since `chosen` was asked for would be chosen."""
    _bar: bytes | None = None
    """The highest lot that is chosen among the others; None while there are places left."""
    _first: list[tuple[bool, bytes, str]] = field(default_factory=list)
    """(is it no vote for the parent, lot, contribution), sorted."""
    _others: list[tuple[bytes, str]] = field(default_factory=list)

    def __len__(self) -> int:
        """Count what was added."""
        return len(self.ids)

    def add(self, contribution_id: str, *, is_first: bool, is_vote: bool) -> None:
        """Let a contribution take part: whether it is in `first` and `votes` of the sample."""
        self.ids.add(contribution_id)
        lot = _lot(self.seed, contribution_id)
        if is_first or self._bar is None or lot < self._bar:
            self.has_changed = True
        if is_first:
            bisect.insort(self._first, (not is_vote, lot, contribution_id))
        else:
            bisect.insort(self._others, (lot, contribution_id))

    def chosen(self, out: Set[str]) -> list[str]:
        """Return what would be listed now, leaving `out` out, which cannot be had."""
        first, others = self._first, self._others
        if out:
            first = [place for place in first if place[2] not in out]
            others = [lot for lot in others if lot[1] not in out]
        kept = self.limit - self.limit // OTHERS_PART
        chosen = [i for _, _, i in first[:kept]]
        rest = sorted([(lot, i) for _, lot, i in first[kept:]] + others[: self.limit])
        num_left = self.limit - len(chosen)
        self.has_changed = False
        self._bar = rest[num_left - 1][0] if 0 < num_left <= len(rest) else None
        return chosen + [i for _, i in rest[:num_left]]
