"""The choice of the tip, kept up to date as commits and contributions arrive.

Runs in: agent, simulation.

`fork_choice.choose_tip` walks the whole chain, which is what rule 16 asks for once a chain has a
reset, and open runs always have one. Here the path that it would walk is kept, and after a change
only the forks are looked at again whose outcome the change can touch.

Invariant: `best(start)` equals `choose_tip(tree, start)`. Every part of the key of a fork (height
certified, supporters, rank, hash) can only grow in favour of a branch when something is added to
it. So an addition below a child that is chosen already changes no fork above it, and one in a
branch that is not chosen can turn over only the fork where that branch leaves the path. Whatever
is taken away makes the walk begin anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from volunteer.rounds.chain import ChainFacts
from volunteer.rounds.fork_choice import Tree, choose_child


@dataclass(slots=True)
class TipChoice:
    """The path of `choose_tip` through one tree."""

    tree: Tree
    genesis_id: str
    path: list[str] = field(default_factory=list)
    """Commit ids by height, from the genesis to the tip chosen."""
    version: int = 0
    """Counts the changes of `path`."""
    _start: str = ""
    _start_height: int = 0
    _changes: list[tuple[str, str | None]] = field(default_factory=list)
    """(commit, None) added, or (commit, author) newly supported."""

    def note_added(self, commit_id: str) -> None:
        """`commit_id` may be stood on from now on."""
        self._changes.append((commit_id, None))

    def note_support(self, commit_id: str, author: str) -> None:
        """A first contribution by `author` on `commit_id` is known."""
        facts = self.tree.facts.get(commit_id)
        if facts is None or not _is_at(self.path, facts):
            self._changes.append((commit_id, author))  # else it speaks for what is chosen

    def note_removed(self) -> None:
        """Some commit may no longer be stood on."""
        self.path.clear()
        self.version += 1

    def leads_to(self, tip: str | None) -> bool:
        """Return whether `tip` is what was chosen last, and nothing was noted since."""
        return bool(self.path) and not self._changes and self.path[-1] == tip

    def best(self, start: str) -> str:
        """Return what `choose_tip(tree, start)` returns."""
        if start == self._start and self.path and not self._changes:
            return self.path[-1]
        start_height = self.tree.facts[start].height
        is_kept = start_height < len(self.path) and self.path[start_height] == start
        if not is_kept or start_height < self._start_height:
            self._walk_from(start)
        else:
            self._look_again(start_height)
        self._start, self._start_height = start, start_height
        self._changes.clear()
        return self.path[-1]

    def current(self) -> list[str]:
        """Return the path with all that was noted, chosen from where it was last asked for."""
        if self._changes or not self.path:
            is_kept = self._start_height < len(self.path)
            self.best(self.path[self._start_height] if is_kept else self.genesis_id)
        return self.path

    def _walk_from(self, start: str) -> None:
        chain, node = [start], start
        while node != self.genesis_id:
            node = self.tree.facts[node].parent_id
            chain.append(node)
        self.path = chain[::-1]
        self._extend()
        self.version += 1

    def _look_again(self, start_height: int) -> None:
        """Decide anew at the forks that the changes can touch, from below."""
        for height in sorted(self._touched(start_height)):
            node = self.path[height]
            child = choose_child(self.tree, node)
            is_last = height + 1 == len(self.path)
            if child is None or (not is_last and self.path[height + 1] == child):
                continue
            del self.path[height + 1 :]
            self._extend()
            self.version += 1
            return  # all above has been decided with everything known

    def _touched(self, start_height: int) -> set[int]:
        heights = set()
        for commit_id, author in self._changes:
            facts = self.tree.facts.get(commit_id)
            if facts is None:
                continue  # looked at once the commit itself is valid
            is_on_path = _is_at(self.path, facts)
            while not _is_at(self.path, facts):
                facts = self.tree.facts[facts.parent_id]
            members = facts.rosters[0] | facts.rosters[1]
            is_stranger = author is not None and author not in members
            if facts.height >= start_height and not is_on_path and not is_stranger:
                heights.add(facts.height)
        return heights

    def _extend(self) -> None:
        while (child := choose_child(self.tree, self.path[-1])) is not None:
            self.path.append(child)


def _is_at(path: list[str], facts: ChainFacts) -> bool:
    return facts.height < len(path) and path[facts.height] == facts.commit_id
