"""What the members of one simulation find out about commits, found once for all of them.

Runs in: simulation. The facts at a commit are a function of its chain (I7), and thirty members need
not each compute them: but the first few do, and later ones now and then, and must find the same.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from volunteer.lab.simulation.errors import BrokenRule
from volunteer.rounds.chain import ChainFacts

NUM_FIRST = 2
"""So many members find the facts at a commit for themselves, at least."""
AGAIN_EVERY = 8
"""And of all who ask later, one in so many."""


class Judged(MutableMapping[str, ChainFacts]):
    """Commit -> its facts. Some are answered as if nobody knew, and held against what they find."""

    __slots__ = ("_facts", "_num_asked", "_num_later")

    def __init__(self) -> None:
        """Begin with nothing known."""
        self._facts: dict[str, ChainFacts] = {}
        self._num_asked: dict[str, int] = {}
        self._num_later = 0

    def __getitem__(self, commit_id: str) -> ChainFacts:
        """Return the facts; KeyError where they are to be found anew."""
        facts = self._facts[commit_id]
        num_asked = self._num_asked[commit_id] = self._num_asked.get(commit_id, 1) + 1
        if num_asked <= NUM_FIRST:
            raise KeyError(commit_id)
        self._num_later += 1
        if self._num_later % AGAIN_EVERY == 0:
            raise KeyError(commit_id)
        return facts

    def __setitem__(self, commit_id: str, facts: ChainFacts) -> None:
        """Note what a member has found; raises BrokenRule where another one found otherwise."""
        if self._facts.setdefault(commit_id, facts) != facts:
            raise BrokenRule(f"I7: two members differ in the facts at {commit_id[:8]}")

    def __delitem__(self, commit_id: str) -> None:
        """Forget the facts at a commit."""
        del self._facts[commit_id]

    def __iter__(self) -> Iterator[str]:
        """Yield every commit judged so far."""
        return iter(self._facts)

    def __len__(self) -> int:
        """Count them."""
        return len(self._facts)
