"""A commit's list, as the aggregator is told it.

Runs in: agent, demo. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from volunteer.messages import ListedWork
from volunteer.rounds.events import Listed


def listed_works(listed: Sequence[Listed]) -> tuple[ListedWork, ...]:
    """Return what the weights of `listed` depend on, in list order."""
    return tuple(
        ListedWork(
            contribution_id=one.contribution_id,
            author=one.contribution.author,
            round_index=one.contribution.round_index,
            blob_id=one.contribution.blob_id,
            tokens=one.contribution.tokens,
            is_late=one.is_late,
            is_on_probation=one.is_on_probation,
            is_excluded=one.is_excluded,
            is_stale=one.is_stale,
        )
        for one in listed
    )
