"""Commits beside the best chain: which are forgotten when there are too many.

Runs in: agent, simulation. Pure.

A stranger may propose on any commit, and on its own commit it is a member: whole trees cost nothing
but signatures. A branch beside the best chain can only win where it leaves it, by certificates and
contributions of members of the rosters *there* (ROUNDS.md rule 17). So branches on which fewer of
those stand go first. What stands on a branch keeps it, and sends it again if it ever comes to win.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from volunteer.rounds.chain import ChainFacts

MAX_SIDE_COMMITS = 256
SIDE_SLACK = 32
"""Commits beyond that which may come before they are looked through again."""


@dataclass(slots=True)
class _Branch:
    fork: ChainFacts
    commits: list[ChainFacts] = field(default_factory=list)
    support: set[str] = field(default_factory=set)

    @property
    def root(self) -> str:
        """The commit with which it leaves the best chain."""
        return self.commits[0].commit_id

    def order(self) -> tuple[int, int, str]:
        """Return what goes first: little support, an old fork, then by hash."""
        return (len(self.support), self.fork.height, self.root)


def side_commits_to_forget(
    facts: Mapping[str, ChainFacts],
    supporters: Mapping[str, Set[str]],
    chain: Sequence[str],
    pinned: Set[str],
    rival: str | None,
    limit: int = MAX_SIDE_COMMITS,
) -> list[str]:
    """Return the commits beside `chain` to forget, so that at most `limit` are left.

    Of two groups that founded an open run apart, each needs to see the whole chain of the other to
    choose, since nobody is a member at the genesis. So the best branch from there, the rival, is
    not counted, up to `limit` heights more than `chain` has.

    Args:
        facts: of all valid commits.
        supporters: commit -> authors of contributions known that are based on it.
        chain: the best chain, by height.
        pinned: commits that are kept, their ancestors among them.
        rival: the lowest commit of the rival, if there is one.
        limit: how many are kept besides `chain`, `pinned` and the rival.

    Returns:
        Commit ids, each after all that builds on it.

    Cost: O(commits).
    """
    branches = _branches(facts, supporters, {*chain, *pinned})
    going: list[str] = []
    counted = []
    for branch in branches:
        if branch.root == rival:
            most = len(chain) + limit
            going += [c.commit_id for c in branch.commits[::-1] if c.height > most]
        else:
            counted.append(branch)
    num_over = sum(len(branch.commits) for branch in counted) - limit
    for branch in sorted(counted, key=_Branch.order):
        num_going = max(0, min(num_over, len(branch.commits)))
        going += [c.commit_id for c in branch.commits[::-1][:num_going]]
        num_over -= num_going
    return going


def _branches(
    facts: Mapping[str, ChainFacts], supporters: Mapping[str, Set[str]], kept: Set[str]
) -> list[_Branch]:
    branch_of: dict[str, _Branch] = {}
    branches = []
    beside = [f for f in facts.values() if f.commit_id not in kept]
    for commit in sorted(beside, key=lambda f: (f.height, f.commit_id)):
        branch = branch_of.get(commit.parent_id)
        if branch is None:
            branch = _Branch(facts[commit.parent_id])
            branches.append(branch)
        branch_of[commit.commit_id] = branch
        branch.commits.append(commit)
        members = branch.fork.rosters[0] | branch.fork.rosters[1]
        branch.support |= members.intersection(supporters.get(commit.commit_id, ()))
    return branches
