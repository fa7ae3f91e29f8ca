"""Seeded sampling of contributions when a commit cannot list all of them.

Runs in: agent, simulation. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from blake3 import blake3

OTHERS_PART = 4
"""One place in so many is never kept for the rosters: else who founds a run would fill it."""


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
    drawn = sorted(eligible, key=lambda i: blake3(f"{seed}/{i}".encode()).digest())
    chosen = [i for i in drawn if i in first][: limit - limit // OTHERS_PART]
    rest = [i for i in drawn if i not in chosen]
    return tuple(sorted(chosen + rest[: limit - len(chosen)]))
