"""What a member needs to get from where it stands to where the others are.

Runs in: agent, simulation. Pure. ROUNDS.md rules 15 and 19.
"""

from __future__ import annotations

from dataclasses import dataclass

from volunteer.rounds.chain import RECENT_COMMITS
from volunteer.rounds.knowledge import Knowledge

CATCH_UP_HEIGHTS = 3
"""Behind by this many commits, a member fetches a state instead of every blob."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What to fetch, or to compute, next."""

    contributions: tuple[str, ...] = ()
    """Whose blobs are needed, in the order in which they are."""
    state_of: str = ""
    """Commit whose state is to be fetched; empty: none."""
    compute: str = ""
    """Commit whose state is to be computed from its parent's; empty: none."""
    lowest: str = ""
    """The lowest commit that is not usable yet; empty: none."""


def needs_of_headers(known: Knowledge, best: str) -> Needs:
    """Return what is missing to stand on `best`, the best chain of headers."""
    missing = _down_to(known, best, known.usable)
    if not missing:
        return Needs()
    lowest = missing[: -CATCH_UP_HEIGHTS - 1 : -1]
    contributions = tuple(i for c in lowest for i in known.commits[c].contributions)
    if len(missing) < CATCH_UP_HEIGHTS:
        return Needs(contributions, lowest=missing[-1])
    facts = known.facts[best]
    # Voters stood on what is certified, so they have checked it: not only its proposer.
    trusted_height = max(facts.certified_height, facts.final_height)
    if len(missing) > known.rules.journal_rounds:
        trusted_height = max(trusted_height, facts.height - RECENT_COMMITS + 1)
    target = next((c for c in missing if known.facts[c].height <= trusted_height), "")
    return Needs(contributions, state_of=target, lowest=missing[-1])


def needs_of_state(known: Knowledge, best: str, tip: str | None, *, has_failed: bool) -> Needs:
    """Return what is missing to hold the state of `best`, which is usable.

    Args:
        known: what is known.
        best: the commit to get to.
        tip: where we stand; blobs far below it are deleted.
        has_failed: whether the last try could not be done: then try the other way.
    """
    missing = _down_to(known, best, known.states)
    if missing and missing[-1] == known.rules.genesis_id:
        missing.pop()  # the genesis state is built, not fetched
        return Needs(state_of=best) if missing else Needs()
    if not missing:
        return Needs()
    lowest = missing[-1]
    tip_height = 0 if tip is None else known.facts[tip].height
    is_too_old = known.facts[lowest].height <= tip_height - known.rules.journal_rounds
    is_far = len(missing) > known.rules.journal_rounds
    can_compute = known.held.issuperset(known.commits[lowest].contributions)
    if can_compute and (is_too_old or is_far) == has_failed:
        return Needs(compute=lowest)
    return Needs(state_of=best)


def _down_to(known: Knowledge, best: str, held: set[str]) -> list[str]:
    """Return `best` and its ancestors above the first that is in `held`, from above."""
    missing = []
    for commit_id in known.chain_down(best):
        if commit_id in held:
            break
        missing.append(commit_id)
    return missing
