"""Which of several branches to stand on.

Runs in: agent, simulation. Pure.

The choice is a function of the commits that may be stood on and of the contributions known
(invariant I5): not of tokens, which are self-declared, nor of length. ROUNDS.md rules 16-18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from volunteer.rounds.chain import ChainFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The commits known, as far as the choice needs them."""

    facts: Mapping[str, ChainFacts]
    children: Mapping[str, Sequence[str]]
    """Commit -> its valid children."""
    supporters: Mapping[str, Set[str]]
    """Commit -> authors of the contributions known that are based on it."""
    may_stand_on: Callable[[str], bool]
    """Whether a commit may be chosen, or walked through."""


def choose_tip(tree: Tree, start: str) -> str:
    """Walk from `start` to a leaf, choosing at each fork (rule 17)."""
    node = start
    while (child := choose_child(tree, node)) is not None:
        node = child
    return node


def choose_child(tree: Tree, node: str) -> str | None:
    """Return the child of `node` to go on with; None at a leaf."""
    children = tree.children.get(node)
    if not children:
        return None
    choices = [c for c in children if tree.may_stand_on(c)]
    if len(choices) <= 1:
        return choices[0] if choices else None
    if not tree.facts[node].rosters[1]:
        return min(choices, key=lambda child: _founding_key(tree, node, child))
    return min(choices, key=lambda child: _branch_key(tree, node, child))


def _branch_key(tree: Tree, node: str, child: str) -> tuple[int, int, int, int, str]:
    """Height certified without a reset since `node`, supporters in its rosters; then rank, hash.

    Before these, where neither tells branches apart, the largest roster that a reset has made above
    and that has certified a commit. Where all of a small roster are away, nobody that counts stands
    on either branch: the rank alone then drew members off what a reset's roster had made final, to
    where one had gone on alone.
    """
    facts = tree.facts[node]
    resets, certified, later_roster = facts.resets, facts.height, 0
    support: set[str] = set()
    facts_of, supporters_of = tree.facts, tree.supporters
    for commit_id in subtree(tree, child):
        below = facts_of[commit_id]
        if below.certified_height > certified and below.resets == resets:
            certified = below.certified_height
        if below.resets > resets:
            voted = facts_of[below.certified_id]
            if voted.resets > resets:
                later_roster = max(later_roster, len(voted.rosters[1]))
        here = supporters_of.get(commit_id)
        if here:
            support |= here
    support &= facts.rosters[0] | facts.rosters[1]
    certified = certified if certified > facts.height else 0
    return (-certified, -len(support), -later_roster, tree.facts[child].rank, child)


def _founding_key(tree: Tree, node: str, child: str) -> tuple[int, int, int, int, str]:
    """Largest roster that certified a commit, authors listed, height certified, rank, hash.

    An open run has no roster at its genesis, so the key above knows nobody there, and any stranger
    could turn everyone over with a first commit of a lower hash. Who founded the run apart, on two
    islands, meets on the branch that more members agreed on; before anything is certified under the
    first rosters, on the one that more different authors have worked on. Authors alone do not say
    who went on: the first commits of every branch may list what all made on the genesis.
    """
    facts = tree.facts[node]
    roster, certified, authors = 0, 0, 0
    for commit_id in subtree(tree, child):
        below = tree.facts[commit_id]
        if below.resets == facts.resets + 1 and below.certified_height > facts.height:
            certified = max(certified, below.certified_height)
            roster = max(roster, len(tree.facts[below.certified_id].rosters[1]))
        authors = max(authors, len(below.times_listed))
    return (-roster, -authors, -certified, tree.facts[child].rank, child)


def subtree(tree: Tree, root: str) -> Iterator[str]:
    """Yield `root` and all below it that may be stood on."""
    stack, children_of, may_stand_on = [root], tree.children, tree.may_stand_on
    while stack:
        node = stack.pop()
        yield node
        children = children_of.get(node)
        if children:
            stack += [c for c in children if may_stand_on(c)]


def is_ancestor(facts: Mapping[str, ChainFacts], ancestor: str, commit: str) -> bool:
    """Return whether `ancestor` is `commit` or lies below it on its chain."""
    height = facts[ancestor].height
    node = facts[commit]
    while node.height > height:
        node = facts[node.parent_id]
    return node.commit_id == ancestor


def common_ancestor(facts: Mapping[str, ChainFacts], one: str, other: str) -> str:
    """Return the highest commit that lies on both chains."""
    a, b = facts[one], facts[other]
    while a.commit_id != b.commit_id:
        if a.height >= b.height:
            a = facts[a.parent_id]
        else:
            b = facts[b.parent_id]
    return a.commit_id


def leaves_final(facts: Mapping[str, ChainFacts], final: str, tip: str) -> bool:
    """Return whether moving to `tip` would leave `final` with no reset between (rule 18)."""
    ancestor = common_ancestor(facts, final, tip)
    return ancestor != final and facts[final].resets == facts[ancestor].resets
