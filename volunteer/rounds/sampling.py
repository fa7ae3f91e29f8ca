"""Seeded sampling of contributions when a commit cannot list all of them.

Runs in: agent, simulation. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3


def sample_contributions(eligible: Sequence[str], limit: int, *, seed: str) -> tuple[str, ...]:
    """Return at most `limit` of `eligible`, sorted.

    The choice is by a hash over the parent commit and the contribution, so the proposer cannot
    favour anyone, and who is left out changes from round to round (its work is carried).
    """
    if len(eligible) <= limit:
        return tuple(sorted(eligible))
    chosen = sorted(eligible, key=lambda i: blake3(f"{seed}/{i}".encode()).digest())[:limit]
    return tuple(sorted(chosen))
