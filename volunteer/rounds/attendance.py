"""What one more commit's list says of who takes part.

Runs in: agent, simulation. Pure. ROUNDS.md rules 6 and 8; chain.py puts it together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from volunteer.rounds.exclusion import PROBATION_ROUNDS
from volunteer.rounds.records import Contribution, Leaving
from volunteer.rounds.tally import Tally


def voters(listed: Sequence[Contribution], base: str) -> frozenset[str]:
    """Return whose listed contributions vote for `base`."""
    return frozenset(c.author for c in listed if c.vote and c.base == base)


def next_seen(
    seen: Mapping[str, int], authors: frozenset[str], height: int, keep_rounds: int
) -> dict[str, int]:
    """Return author -> height of the last commit that lists it, for the last `keep_rounds`."""
    oldest = height - keep_rounds
    recent = {author: seen_at for author, seen_at in seen.items() if seen_at > oldest}
    return recent | dict.fromkeys(authors, height)


def leavers(farewells: Sequence[Leaving], listed: Sequence[Contribution]) -> frozenset[str]:
    """Return who leaves: not one who has contributed on a later base since."""
    latest = {c.author: c.round_index for c in sorted(listed, key=lambda c: c.round_index)}
    return frozenset(f.author for f in farewells if latest.get(f.author, -1) <= f.round_index)


def next_times_listed(times_listed: Tally, authors: frozenset[str]) -> Tally:
    """Return how often each author was listed, up to PROBATION_ROUNDS."""
    if all(times_listed.get(author) == PROBATION_ROUNDS for author in authors):
        return times_listed  # one tally for all the heights at which nothing changes
    return times_listed.counting(authors, up_to=PROBATION_ROUNDS)
