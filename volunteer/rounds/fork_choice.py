"""Which of several branches to stand on.

Runs in: agent, simulation. Pure.

The choice is a function of the commits that may be stood on and of the contributions known
(invariant I5): not of tokens, which are self-declared, nor of length. ROUNDS.md rules 16-18.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from volunteer.rounds.chain import ChainFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The commits known, as far as the choice needs them."""

    facts: Mapping[str, ChainFacts]
    children: Mapping[str, Sequence[str]]
    """Commit -> its valid children."""
    supporters: Mapping[str, set[str]]
    """Commit -> authors of the contributions known that are based on it."""
    may_stand_on: Callable[[str], bool]
    """Whether a commit may be chosen, or walked through."""


def choose_tip(tree: Tree, start: str) -> str:
    """Walk from `start` to a leaf, choosing at each fork (rule 17)."""
    node = start
    while choices := [c for c in tree.children.get(node, ()) if tree.may_stand_on(c)]:
        node = choices[0] if len(choices) == 1 else _choose_child(tree, node, choices)
    return node


def _choose_child(tree: Tree, node: str, choices: Sequence[str]) -> str:
    facts = tree.facts[node]

    def key(child: str) -> tuple[int, int, int, str]:
        branch = list(subtree(tree, child))
        certified = max(
            (
                tree.facts[c].certified_height
                for c in branch
                if tree.facts[c].resets == facts.resets
            ),
            default=0,
        )
        members = facts.rosters[0] | facts.rosters[1]
        support = {a for c in branch for a in tree.supporters.get(c, ()) if a in members}
        in_branch = certified if certified > facts.height else 0
        return (-in_branch, -len(support), tree.facts[child].rank, child)

    return min(choices, key=key)


def subtree(tree: Tree, root: str) -> Iterator[str]:
    """Yield `root` and all below it that may be stood on."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(c for c in tree.children.get(node, ()) if tree.may_stand_on(c))


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
