"""What a chain of commits says: a pure function of the commits up to one of them.

Runs in: agent, simulation. Pure.

Nothing else enters: no clock, no gossip, no local state, so the facts at a commit are the same on
every machine (invariant I7). ROUNDS.md rules 5-13.

A roster pair (previous, current) decides what a quorum is. It changes only when a commit becomes
final at which it already held (rule 10), or by an explicit reset (rule 11).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from blake3 import blake3

from volunteer.rounds.attendance import leavers, next_seen, next_times_listed, voters
from volunteer.rounds.bad_work import is_stale, marks_problem, next_contents, next_strikes
from volunteer.rounds.events import Listed
from volunteer.rounds.exclusion import PROBATION_ROUNDS as PROBATION_ROUNDS
from volunteer.rounds.exclusion import Strikes
from volunteer.rounds.records import Commit, Contribution, Leaving
from volunteer.rounds.tally import Tally

RECENT_COMMITS = 3
"""A peer listed in the last 3 commits is expected in the next one (rules 13, 22)."""
COMMITTEE_PART = 3
"""Where more are active than a commit can list, the roster is the first max_contributions / 3 of
them: both rosters then fit into one list, and a third of it is left for everybody else."""
OUTSIDER_RANKS = 4
"""Peers that the chain does not know stand in after all that it knows, spread by hash."""

LOTS_REMEMBERED = 4096
"""Ranks are drawn for every commit of a height, and asked for by every event."""

Rosters = tuple[frozenset[str], frozenset[str]]
"""(previous, current)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRules:
    """What the RunSpec fixes for every chain of a run's module."""

    run_id: str
    module_id: str
    genesis_id: str
    publisher: str
    """The genesis roster; empty for an open run, whose first commit makes its roster."""
    expiry_rounds: int
    demote_rounds: int
    max_contributions: int
    quorum_numerator: int
    quorum_denominator: int
    journal_rounds: int = 8
    """Heights below the tip of which blobs and states are kept by everyone."""
    state_bytes: int = 0
    """Of a state's file; 0: not known, and a state counts as cheaper to fetch than any blobs."""
    is_genesis_given: bool = False
    """Whether the genesis state cannot be computed: it is fetched, as any other."""

    def __hash__(self) -> int:
        """Hash what tells runs apart: ranks are looked up by the rules at every event."""
        return hash(self.genesis_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainFacts:
    """What the chain that ends in `commit_id` says."""

    commit_id: str
    parent_id: str
    """Empty for the genesis."""
    height: int
    rank: int
    proposer: str
    listed: frozenset[str]
    """Contributions that this commit lists."""
    seen: Mapping[str, int]
    """Author -> height of the last commit that lists it, within `expiry_rounds`."""
    away: frozenset[str]
    """Authors that said they leave and have not been listed since."""
    demoted_until: Mapping[str, int]
    """Peer -> last height at which it ranks last (rule 12)."""
    times_listed: Tally
    """Author -> number of commits that list it, counted up to PROBATION_ROUNDS."""
    rosters: Rosters
    rosters_since: int
    """Height of the commit at which `rosters` began to hold."""
    resets: int
    last_reset: int
    votes_for_parent: frozenset[str]
    """Voters for the parent that are listed here."""
    is_parent_prompt: bool
    """Whether this list alone certifies the parent (rule 8)."""
    certified_height: int
    certified_id: str
    """The highest commit that this chain certifies; the genesis counts as certified."""
    final_height: int
    final_id: str
    """The highest commit that this chain makes final; the genesis counts as final."""
    strikes: Strikes = field(default_factory=Strikes)
    """Who is excluded, and who may be soon."""
    contents: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """What the last commits list (bad_work.next_contents)."""
    _ranks: dict[ChainRules, tuple[str, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    """What `rank_order` has found: it is asked at every event, and costs a hash a peer."""


def genesis_facts(rules: ChainRules) -> ChainFacts:
    """Return what is known before the first commit."""
    roster = frozenset({rules.publisher} - {""})
    return ChainFacts(
        commit_id=rules.genesis_id,
        parent_id="",
        height=0,
        rank=0,
        proposer="",
        listed=frozenset(),
        seen=dict.fromkeys(roster, 0),
        away=frozenset(),
        demoted_until={},
        times_listed=Tally(),
        rosters=(roster, roster),
        rosters_since=0,
        resets=0,
        last_reset=0,
        votes_for_parent=frozenset(),
        is_parent_prompt=False,
        certified_height=0,
        certified_id=rules.genesis_id,
        final_height=0,
        final_id=rules.genesis_id,
    )


def is_quorum(rules: ChainRules, rosters: Rosters, peers: frozenset[str]) -> bool:
    """Return whether `peers` hold more than the quorum's part of both rosters (rule 7)."""
    return all(
        len(peers & roster) * rules.quorum_denominator > len(roster) * rules.quorum_numerator
        for roster in rosters
    )


def active_at(rules: ChainRules, facts: ChainFacts) -> frozenset[str]:
    """Return the authors listed within `expiry_rounds`, less those that left (rule 6)."""
    return _listed_since(facts, facts.height - rules.expiry_rounds)


def expected_at(facts: ChainFacts) -> frozenset[str]:
    """Return the authors that the next round is expected to hear from (rule 22)."""
    return _listed_since(facts, facts.height - RECENT_COMMITS)


def _listed_since(facts: ChainFacts, oldest: int) -> frozenset[str]:
    """Return who was listed above `oldest`, and has neither left nor been excluded since."""
    found = (
        peer for peer, height in facts.seen.items() if height > oldest and peer not in facts.away
    )
    return frozenset(found) - excluded_at(facts)


def excluded_at(facts: ChainFacts) -> frozenset[str]:
    """Return whom a child of this commit gives no weight (exclusion.py)."""
    return facts.strikes.excluded(facts.height + 1)


def rank_order(rules: ChainRules, facts: ChainFacts) -> tuple[str, ...]:
    """Return the active peers in the order in which they may propose a child (rule 13)."""
    order = facts._ranks.get(rules)
    if order is None:
        order = facts._ranks[rules] = _find_rank_order(rules, facts)
    return order


def _find_rank_order(rules: ChainRules, facts: ChainFacts) -> tuple[str, ...]:
    active, recent = active_at(rules, facts), expected_at(facts)
    if 2 * len(recent) < len(active):
        recent = active  # a proposer that lists nobody else must not make itself the only one

    def key(peer: str) -> tuple[bool, bool, bytes]:
        is_demoted = facts.demoted_until.get(peer, -1) >= facts.height
        return (is_demoted, peer not in recent, _peer_hash(rules, facts, peer))

    return tuple(sorted(active, key=key))


def rank_of(rules: ChainRules, facts: ChainFacts, peer: str) -> int:
    """Return the rank with which `peer` may propose a child of this commit.

    Peers that the chain does not know come after all that it knows, spread over a few ranks by
    hash, so that several newcomers rarely propose at once.
    """
    order = rank_order(rules, facts)
    if peer in order:
        return order.index(peer)
    return len(order) + _peer_hash(rules, facts, peer)[0] % OUTSIDER_RANKS


def _peer_hash(rules: ChainRules, facts: ChainFacts, peer: str) -> bytes:
    # The parent's hash and not the commit's own, which its proposer could grind.
    return _lot(rules.run_id, rules.module_id, facts.height, facts.parent_id, peer)


@functools.lru_cache(LOTS_REMEMBERED)
def _lot(run_id: str, module_id: str, height: int, parent_id: str, peer: str) -> bytes:
    return blake3(f"{run_id}/{module_id}/{height}/{parent_id}/{peer}".encode()).digest()


def commit_problem(
    rules: ChainRules,
    parent: ChainFacts,
    commit: Commit,
    contributions: Mapping[str, Contribution],
    leavings: Mapping[str, Leaving],
) -> str:
    """Return why `commit` may not follow `parent`, as a sentence; empty if it may.

    Every record that it lists must be in `contributions` and `leavings`.
    """
    if (commit.run_id, commit.module_id) != (rules.run_id, rules.module_id):
        return "it belongs to another run or module"
    if commit.round_index != parent.height + 1:
        return f"its height is {commit.round_index}, its parent's {parent.height}"
    if not 1 <= len(commit.contributions) <= rules.max_contributions:
        return f"it lists {len(commit.contributions)} contributions"
    if commit.rank != rank_of(rules, parent, commit.proposer):
        return "its proposer does not have that rank"
    bases = {parent.commit_id: parent.height, parent.parent_id: parent.height - 1}
    authors = listed_authors(parent, contributions)
    for contribution_id in commit.contributions:
        contribution = contributions[contribution_id]
        if contribution_id in parent.listed:
            return "it lists a contribution that its parent lists already"
        if bases.get(contribution.base) != contribution.round_index:
            return "it lists a contribution that was not made on its parent or its parent's parent"
        if (contribution.author, contribution.base) in authors:
            return "it lists two contributions of one author on one base"
        authors.add((contribution.author, contribution.base))
    if any(bases.get(leavings[i].base) != leavings[i].round_index for i in commit.leaving):
        return "it lists an old farewell"
    return marks_problem(parent.strikes, commit, contributions)


def listed_authors(
    facts: ChainFacts, contributions: Mapping[str, Contribution]
) -> set[tuple[str, str]]:
    """Return (author, base) of all that a commit lists: its child may not list these again."""
    return {(contributions[i].author, contributions[i].base) for i in facts.listed}


def next_facts(
    rules: ChainRules,
    known: Mapping[str, ChainFacts],
    commit_id: str,
    commit: Commit,
    contributions: Mapping[str, Contribution],
    leavings: Mapping[str, Leaving],
) -> ChainFacts:
    """Return the facts at `commit`, a valid child of a commit in `known` (rules 6-12)."""
    parent = known[commit.parent]
    listed = [contributions[contribution_id] for contribution_id in commit.contributions]
    authors = frozenset(contribution.author for contribution in listed)
    votes = voters(listed, parent.commit_id)
    is_prompt = is_quorum(rules, parent.rosters, votes)
    late_votes = voters(listed, parent.parent_id)
    certified, final = _certificates(rules, known, parent, late_votes, is_prompt=is_prompt)
    keep_rounds = max(rules.expiry_rounds, RECENT_COMMITS)
    seen = next_seen(parent.seen, authors, commit.round_index, keep_rounds)
    facts = replace(
        parent,
        commit_id=commit_id,
        parent_id=parent.commit_id,
        height=commit.round_index,
        rank=commit.rank,
        proposer=commit.proposer,
        listed=frozenset(commit.contributions),
        seen=seen,
        away=(parent.away - authors) | leavers([leavings[i] for i in commit.leaving], listed),
        demoted_until=_demotions(rules, parent, commit),
        times_listed=next_times_listed(parent.times_listed, authors),
        votes_for_parent=votes,
        is_parent_prompt=is_prompt,
        certified_height=certified[0],
        certified_id=certified[1],
        final_height=final[0],
        final_id=final[1],
        strikes=next_strikes(parent, commit, contributions, seen, lambda: active_at(rules, parent)),
        contents=next_contents(parent.contents, commit.round_index, listed),
    )
    return _with_rosters(rules, parent, facts)


_Place = tuple[int, str]
"""Height and id of a commit."""


def _certificates(
    rules: ChainRules,
    known: Mapping[str, ChainFacts],
    parent: ChainFacts,
    late_votes: frozenset[str],
    *,
    is_prompt: bool,
) -> tuple[_Place, _Place]:
    """Return the highest certified and the highest final commit at a child of `parent`.

    The parent is certified by the child's list, the grandparent by both lists; rules 8 and 9.
    """
    certified = (parent.certified_height, parent.certified_id)
    final = (parent.final_height, parent.final_id)
    if is_prompt:
        certified = _higher(certified, parent)
        if parent.is_parent_prompt:
            final = _higher(final, known[parent.parent_id])
    grandparent = known.get(parent.parent_id)
    if grandparent is None:
        return certified, final
    if is_quorum(rules, grandparent.rosters, parent.votes_for_parent | late_votes):
        certified = _higher(certified, grandparent)
        if grandparent.is_parent_prompt:
            final = _higher(final, known[grandparent.parent_id])
    return certified, final


def _higher(place: _Place, commit: ChainFacts) -> _Place:
    return place if commit.height <= place[0] else (commit.height, commit.commit_id)


def _with_rosters(rules: ChainRules, parent: ChainFacts, facts: ChainFacts) -> ChainFacts:
    """Move the rosters on (rule 10) or reset them (rule 11)."""
    active = active_at(rules, facts)
    has_new_final = facts.final_height > parent.final_height
    if active and has_new_final and facts.final_height >= facts.rosters_since:
        rosters = (facts.rosters[1], _roster(rules, facts, active))
        if rosters != facts.rosters:
            facts = replace(facts, rosters=rosters, rosters_since=facts.height)
        return facts
    # An open run starts without a roster: its first commit makes one, which counts as a reset.
    is_open = not facts.rosters[1]
    idle_heights = facts.height - max(facts.final_height, facts.last_reset)
    is_expired = idle_heights >= rules.expiry_rounds and not is_quorum(rules, facts.rosters, active)
    if active and (is_open or is_expired):
        roster = _roster(rules, facts, active)
        return replace(
            facts,
            rosters=(roster, roster),
            rosters_since=facts.height,
            resets=facts.resets + 1,
            last_reset=facts.height,
        )
    return facts


def _roster(rules: ChainRules, facts: ChainFacts, active: frozenset[str]) -> frozenset[str]:
    """Return who makes the next roster: all that are active, or a committee of them.

    A quorum must fit into one commit's list, or nothing is ever certified promptly. The committee
    is whom the next ranks name: seen lately, and drawn anew by hash whenever the rosters move on.
    """
    if len(active) <= rules.max_contributions:
        return active
    size = max(1, rules.max_contributions // COMMITTEE_PART)
    return frozenset(rank_order(rules, facts)[:size])


def _demotions(rules: ChainRules, parent: ChainFacts, commit: Commit) -> dict[str, int]:
    until = {p: h for p, h in parent.demoted_until.items() if h >= commit.round_index}
    if commit.rank > 0:
        missed = rank_order(rules, parent)[: commit.rank]
        until.update(dict.fromkeys(missed, commit.round_index + rules.demote_rounds - 1))
    return until


def listed_in_order(
    commit_ids: tuple[str, ...], parent: ChainFacts, contributions: Mapping[str, Contribution]
) -> tuple[Listed, ...]:
    """Return the contributions of a child of `parent` with what their weight depends on."""
    return tuple(_listed(i, parent, contributions[i]) for i in commit_ids)


def _listed(contribution_id: str, parent: ChainFacts, contribution: Contribution) -> Listed:
    author, height = contribution.author, parent.height + 1
    return Listed(
        contribution_id=contribution_id,
        contribution=contribution,
        is_late=contribution.base != parent.commit_id,
        is_on_probation=parent.times_listed.get(author, 0) < PROBATION_ROUNDS
        or parent.strikes.is_on_probation(author, height),
        is_excluded=parent.strikes.is_excluded(author, height),
        is_stale=is_stale(parent.contents, contribution),
    )
