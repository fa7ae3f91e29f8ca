"""When a member may propose the next commit, and what it may list.

Runs in: agent, simulation. Pure. ROUNDS.md rules 5, 22 and 23.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from volunteer.rounds.chain import (
    RECENT_COMMITS,
    ChainFacts,
    excluded_at,
    expected_at,
    is_quorum,
    listed_authors,
    rank_of,
)
from volunteer.rounds.fork_choice import common_ancestor, is_ancestor, subtree
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import Contribution

QUORUM_WAIT_FRACTION = 0.8
"""Of the failover interval: what a proposer waits for votes beyond its turn."""
LAGGING_HEIGHTS = 6
"""So far above the last final commit, usually 2 heights, it waits for votes announced as well."""

WAITED_ROUNDS = 2
"""So long a member waits for what others stand on, while it can be there to wait."""


@dataclass(slots=True, kw_only=True)
class Timing:
    """Seconds of one's own clock; `grace_s` and `failover_s` follow the measured exchange time."""

    round_s: float
    grace_s: float
    failover_s: float
    target_tokens: int = 0
    """Close the round early after this many tokens; 0: never."""

    def is_round_over(self, elapsed_s: float, tokens: int) -> bool:
        """Return whether to close the round (rule 20)."""
        return 0 < self.target_tokens <= tokens or elapsed_s >= self.round_s


def eligible_contributions(
    known: Knowledge, tip: ChainFacts, banned: Collection[str]
) -> tuple[str, ...]:
    """Return the contributions that a child of `tip` may list and whose blobs are held, sorted.

    Work of excluded authors is among them only where there is no other: it counts for nothing, but
    where everybody else is gone, a commit of it lets the heights pass that the exclusion lasts.
    """
    late = known.based_on.get(tip.parent_id, set()) - tip.listed
    eligible: list[str] = []
    authors = listed_authors(tip, known.contributions)
    for contribution_id in sorted(known.based_on.get(tip.commit_id, set()) | late):
        contribution = known.contributions[contribution_id]
        key = (contribution.author, contribution.base)
        if (
            contribution.author not in banned
            and contribution_id in known.held
            and contribution.round_index == known.facts[contribution.base].height
            and key not in authors
        ):
            authors.add(key)
            eligible.append(contribution_id)
    excluded = excluded_at(tip)
    wanted = [i for i in eligible if known.contributions[i].author not in excluded]
    return tuple(wanted or eligible)


def roster_votes(known: Knowledge, tip: ChainFacts, eligible: Iterable[str]) -> frozenset[str]:
    """Return those of `eligible` that members of the rosters have made on `tip`, or just below."""
    members = tip.rosters[0] | tip.rosters[1]
    return frozenset(i for i in eligible if known.contributions[i].author in members)


def votes_for(known: Knowledge, tip: ChainFacts, contribution_ids: Iterable[str]) -> frozenset[str]:
    """Return those of `contribution_ids` that vote for `tip`: a child's list may certify it."""
    found = ((i, known.contributions[i]) for i in contribution_ids)
    return frozenset(i for i, record in found if record.vote and record.base == tip.commit_id)


def leavings_to_list(known: Knowledge, tip: ChainFacts, me: str, *, limit: int) -> tuple[str, ...]:
    """Return the farewells that a child of `tip` may list; not our own, since we are back."""
    heights = {tip.commit_id: tip.height, tip.parent_id: tip.height - 1}
    ids = sorted(
        leaving_id
        for leaving_id, leaving in known.leavings.items()
        if heights.get(leaving.base) == leaving.round_index
        and leaving.author not in tip.away
        and leaving.author != me
    )
    return tuple(ids[:limit])


def least_turn_delay_s(known: Knowledge, tip: ChainFacts, timing: Timing, me: str) -> float:
    """Return what `turn_delay_s` is at least, whatever is held: cheap enough for every event."""
    rank = rank_of(known.rules, tip, me)
    turn_s = timing.failover_s if tip.rosters[1] else timing.grace_s
    return timing.grace_s + rank * turn_s if rank else 0.0


def turn_delay_s(known: Knowledge, tip: ChainFacts, timing: Timing, me: str) -> float:
    """Return how long after the round's close `me` proposes, as things stand (rule 22).

    Rank 0 proposes at once when everyone expected is there with a quorum of votes; rank k after the
    grace and k failover intervals, and some longer while the votes are no quorum: longest where
    nothing has become final for some heights, and the votes that lack have been announced.
    """
    rank = rank_of(known.rules, tip, me)
    held = [
        known.contributions[i] for i in known.based_on.get(tip.commit_id, ()) if i in known.held
    ]
    votes = frozenset(c.author for c in held if c.vote) - excluded_at(tip)  # not listed
    # A roster of nobody (the start of an open run) has no quorum to wait for.
    has_quorum = not tip.rosters[1] or is_quorum(known.rules, tip.rosters, votes)
    # Until the chain has some commits, nobody knows whom to expect: wait the grace.
    knows_whom = tip.height >= RECENT_COMMITS or len(tip.rosters[1]) > 1
    is_complete = expected_at(tip) <= {c.author for c in held}
    if rank == 0 and is_complete and has_quorum and knows_whom:
        return 0.0
    num_turns = rank if tip.rosters[1] else _num_lower_ranks(known, tip, held, rank)
    num_empty = rank - num_turns
    delay_s = timing.grace_s + num_turns * timing.failover_s + num_empty * timing.grace_s
    if not has_quorum:
        delay_s += QUORUM_WAIT_FRACTION * timing.failover_s
        if _is_quorum_on_its_way(known, tip):
            delay_s += timing.failover_s
    return delay_s


def _is_quorum_on_its_way(known: Knowledge, tip: ChainFacts) -> bool:
    """Return whether finality lags, and the blobs alone lack of a quorum of votes.

    Where links are slow the blobs of the roster's votes come later than a proposer waits; no list
    then certifies its parent promptly, and nothing becomes final for long. Who announces a vote and
    keeps its blob back delays such a round by one failover interval, and no other.
    """
    if tip.height - tip.final_height < LAGGING_HEIGHTS:
        return False
    announced = (known.contributions[i] for i in known.based_on.get(tip.commit_id, ()))
    voters = frozenset(contribution.author for contribution in announced if contribution.vote)
    return is_quorum(known.rules, tip.rosters, voters)


def _num_lower_ranks(
    known: Knowledge, tip: ChainFacts, held: Iterable[Contribution], rank: int
) -> int:
    """Return how many ranks below `rank` those who contributed on `tip` have.

    At the start of an open run the chain knows nobody, and everybody's rank is one of four by hash:
    a failover interval is waited only for a rank that somebody is seen to have, for another one the
    grace, in which more may come. Otherwise the first commit waited up to three intervals for
    nobody.
    """
    ranks = {rank_of(known.rules, tip, contribution.author) for contribution in held}
    return sum(other < rank for other in ranks)


def is_left_behind(known: Knowledge, tip: ChainFacts, best: str, me: str) -> bool:
    """Return whether to move on before contributing: where all others go, nobody could list it.

    It could speak for `tip` alone. Where one vote decides, that of the publisher of a young run, it
    turned everyone over from five heights above to the fork that it had been paused on. Where fewer
    than half of those stand who are expected at the tip, it is no reason: a member could otherwise
    stop a run with commits of its own whose blobs it keeps back.

    Args:
        known: what the member knows.
        tip: where it stands.
        best: where the headers lead it to.
        me: the member.
    """
    above = known.facts[best]
    if is_ancestor(known.facts, tip.commit_id, best) and above.height <= tip.height + 1:
        return False
    expected = expected_at(tip) - {me}
    gone = _standing_above(known, common_ancestor(known.facts, tip.commit_id, best), best) - {me}
    if expected:
        gone &= expected
    return bool(gone) and 2 * len(gone) >= len(expected)


def _standing_above(known: Knowledge, ancestor: str, best: str) -> frozenset[str]:
    """Return whose contributions stand on the chain above `ancestor`, up to `best`.

    Without those who have proposed it: alone they stand on nothing, and may keep its blobs back.
    """
    standing: set[str] = set()
    proposers: set[str] = set()
    facts = known.facts[best]
    while facts.commit_id != ancestor:
        standing |= known.supporters.get(facts.commit_id, set())
        proposers.add(facts.proposer)
        facts = known.facts[facts.parent_id]
    return frozenset(standing - proposers)


def is_child_on_its_way(known: Knowledge, tip: ChainFacts, may_wait: bool) -> bool:
    """Return whether another child of `tip` makes a proposal needless (rule 23).

    A child that only its proposer stands on delays nobody: it may be withheld.

    Args:
        known: what the member knows.
        tip: where it stands.
        may_wait: for a child that others stand on, since it has not stood there for long.
    """
    tree = known.headers
    for child in known.children.get(tip.commit_id, ()):
        if child in known.refused:
            continue
        branch = list(subtree(tree, child))
        if any(known.facts[c].certified_height > tip.height for c in branch):
            return True
        standing = frozenset(a for c in branch for a in known.supporters.get(c, ()))
        if tip.rosters[1] and is_quorum(known.rules, tip.rosters, standing):
            return True
        others = standing - {known.facts[child].proposer}
        if others and may_wait:
            return True
    return False
