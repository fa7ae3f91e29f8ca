"""How a commit's records carry the books of bad work on: marks, blame, and repeated content.

Runs in: agent, simulation. Pure. The rules themselves are in exclusion.py and scoring.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import msgspec

from volunteer.rounds.exclusion import Strikes, max_struck
from volunteer.rounds.records import Commit, Contribution
from volunteer.rounds.scoring import blamed_authors, draw_scorers

if TYPE_CHECKING:
    from volunteer.rounds.chain import ChainFacts

STALE_ROUNDS = 8
"""Commits whose contents are remembered: a blob that repeats one of them has no weight."""


def marks_problem(
    strikes: Strikes, commit: Commit, contributions: Mapping[str, Contribution]
) -> str:
    """Return why a commit may not mark what it does, as a sentence; empty if it may.

    Args:
        strikes: at its parent.
        commit: whose marks they are.
        contributions: all that it lists.
    """
    if not commit.marks:
        return ""
    height = commit.round_index
    authors = {contributions[i].author for i in commit.contributions}
    counted = {author for author in authors if not strikes.is_excluded(author, height)}
    marked = {contributions[i].author for i in commit.marks}
    if len(marked) > max_struck(len(counted)):
        return f"it marks the work of {len(marked)} of {len(counted)} authors"
    if not marked <= counted:
        return "it marks the work of an excluded author"
    return ""


def next_strikes(
    parent: ChainFacts,
    commit: Commit,
    contributions: Mapping[str, Contribution],
    recent: Collection[str],
    members: Callable[[], frozenset[str]],
) -> Strikes:
    """Return the strikes at a child of `parent`.

    Args:
        parent: its facts.
        commit: the child.
        contributions: all that both list.
        recent: authors whose strikes are remembered.
        members: returns who is active at the parent; asked only where a verdict is listed.
    """
    listed = [contributions[i] for i in commit.contributions]
    verdicts = [c for c in listed if c.base == parent.commit_id and c.harmful is not msgspec.UNSET]
    blamed: frozenset[str] = frozenset()
    if verdicts:
        authors = {i: contributions[i].author for i in parent.listed}
        scorers = draw_scorers(parent.commit_id, members())
        blamed = blamed_authors(authors, verdicts, scorers)
    return parent.strikes.after(
        commit.round_index,
        listed={c.author for c in listed},
        marked={contributions[i].author for i in commit.marks},
        blamed=blamed,
        recent=recent,
        rosters=parent.rosters,
    )


def next_contents(
    contents: Mapping[str, tuple[int, int]], height: int, listed: Collection[Contribution]
) -> Mapping[str, tuple[int, int]]:
    """Return what contents the last STALE_ROUNDS commits list, the one at `height` the last.

    Returns:
        Content hash -> (height of the last commit that lists it, and of the first).
    """
    new = {c.content_hash for c in listed if c.content_hash is not msgspec.UNSET}
    if not new and not contents:
        return contents
    kept = {h: place for h, place in contents.items() if place[0] > height - STALE_ROUNDS}
    for content_hash in new:
        first = kept[content_hash][1] if content_hash in kept else height
        kept[content_hash] = (height, first)
    return kept


def is_stale(contents: Mapping[str, tuple[int, int]], contribution: Contribution) -> bool:
    """Return whether `contribution` repeats what its own base, or a commit before that, lists.

    What was first listed above its base is a copy, not a repetition: a proposer that leaves an
    honest contribution out and lists its own copy, of whatever base, must not make the original,
    listed late, look old.
    """
    if contribution.content_hash is msgspec.UNSET:
        return False
    place = contents.get(contribution.content_hash)
    return place is not None and place[1] <= contribution.round_index
