"""What a member needs to get from where it stands to where the others are.

Runs in: agent, simulation. Pure. ROUNDS.md rules 15 and 19.

Two ways lead there: replaying commits, which needs the blobs that they list, and fetching the state
after one of them, which needs 8 bytes a parameter and skips the blobs below it. The one with fewer
bytes still to come is taken; what is on the disk already costs nothing, and what peers no longer
keep cannot be had at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from volunteer.rounds.chain import RECENT_COMMITS
from volunteer.rounds.knowledge import Knowledge

CATCH_UP_HEIGHTS = 3
"""Behind by less, a member replays whatever it costs: these blobs are on their way to everyone, and
what one has computed needs nobody's word."""
MAX_BLOB_FAILURES = 2
"""After so many in a row a blob counts as one that cannot be had."""


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


@dataclass(frozen=True, slots=True)
class Stock:
    """What the disk holds of states, and what could not be had."""

    state_parts: Mapping[str, int] = field(default_factory=dict)
    """Commit -> bytes of its state's file that are here, or on their way."""
    failures_of: Callable[[str], int] = lambda _subject: 0
    """How often in a row a commit's state, or a contribution's blob, could not be had."""


EMPTY_STOCK = Stock()


def needs_of_headers(known: Knowledge, best: str, stock: Stock = EMPTY_STOCK) -> Needs:
    """Return what is missing to stand on `best`, the best chain of headers."""
    missing = _down_to(known, best, known.usable)
    if not missing:
        return Needs()
    target = ""
    if len(missing) >= CATCH_UP_HEIGHTS:
        target = cheapest_state(known, missing, stock)
    # Both ways at once where the cheaper one is not known, or has failed.
    is_in_doubt = stock.failures_of(target) > 0 or not known.rules.state_bytes
    above = missing[: missing.index(target)] if target and not is_in_doubt else missing
    lowest = above[: -CATCH_UP_HEIGHTS - 1 : -1]
    contributions = tuple(i for c in lowest for i in known.commits[c].contributions)
    return Needs(contributions, state_of=target, lowest=missing[-1])


def cheapest_state(known: Knowledge, missing: Sequence[str], stock: Stock) -> str:
    """Return the commit whose state is to be fetched, or nothing where replaying costs less.

    Args:
        known: what is known.
        missing: commits above what is usable, the highest first.
        stock: what is here, and what failed.
    """
    trusted = _trusted(known, missing)
    oldest = known.facts[missing[0]].height - known.rules.journal_rounds
    kept = [c for c in trusted if known.facts[c].height >= oldest]
    if not kept:
        return trusted[0] if trusted else ""  # it is not likely to be had, and nothing else is
    state_bytes = known.rules.state_bytes
    if not state_bytes:
        return kept[0]
    bytes_above, so_far = {}, 0.0
    for commit_id in missing:
        bytes_above[commit_id] = so_far
        so_far += _blob_bytes(known, commit_id, oldest, stock)
    if known.rules.is_genesis_given and not known.states:
        so_far += state_bytes  # replaying begins with the genesis
    costs = {
        commit_id: bytes_above[commit_id]
        + max(0, state_bytes - stock.state_parts.get(commit_id, 0))
        for commit_id in kept
    }
    cheapest = min(kept, key=costs.__getitem__)  # of equals the highest
    is_replay_cheaper = so_far <= costs[cheapest] and so_far < math.inf
    return "" if is_replay_cheaper else cheapest


def _trusted(known: Knowledge, missing: Sequence[str]) -> list[str]:
    """Return the commits whose state voters have checked, not only its proposer, highest first."""
    facts = known.facts[missing[0]]
    height = max(facts.certified_height, facts.final_height)
    if len(missing) > known.rules.journal_rounds:
        height = max(height, facts.height - RECENT_COMMITS + 1)
    return [c for c in missing if known.facts[c].height <= height]


def _blob_bytes(known: Knowledge, commit_id: str, oldest: int, stock: Stock) -> float:
    """Return the bytes that are lacking to apply a commit; infinite if they cannot be had."""
    num_bytes = 0
    for contribution_id in known.commits[commit_id].contributions:
        contribution = known.contributions[contribution_id]
        if contribution_id in known.held:
            continue
        is_lost = stock.failures_of(contribution_id) >= MAX_BLOB_FAILURES
        if contribution.round_index < oldest or is_lost:
            return math.inf
        num_bytes += contribution.blob_bytes
    return num_bytes


def needs_of_state(
    known: Knowledge, best: str, tip: str | None, failures_of: Callable[[str], int]
) -> Needs:
    """Return what is missing to hold the state of `best`, which is usable.

    Args:
        known: what is known.
        best: the commit to get to.
        tip: where we stand; blobs far below it are deleted.
        failures_of: how often in a row a state could not be had: then try the other way.
    """
    genesis = known.rules.genesis_id
    missing = _down_to(known, best, known.states)
    if missing and missing[-1] == genesis:
        if known.rules.is_genesis_given:
            is_genesis_next = failures_of(best) > failures_of(genesis)
            return Needs(state_of=genesis if is_genesis_next else best)
        missing.pop()  # the genesis state is built, not fetched
        return Needs(state_of=best) if missing else Needs()
    if not missing:
        return Needs()
    has_failed = failures_of(best) % 4 >= 2
    lowest = missing[-1]
    tip_height = 0 if tip is None else known.facts[tip].height
    is_too_old = known.facts[lowest].height <= tip_height - known.rules.journal_rounds
    is_all_here = all(known.held.issuperset(known.commits[c].contributions) for c in missing)
    # Blobs that are here cost nothing: with the size of a state known, they are always cheaper.
    is_cheap = is_all_here and known.rules.state_bytes > 0
    is_far = len(missing) > known.rules.journal_rounds and not is_cheap
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
