"""Who is excluded for bad work: a pure function of the commits, and so known to every newcomer.

Runs in: agent, simulation, lab. Pure.

A contribution is *marked* where the commit's own aggregation finds it bad (training/weighing.py).
The commit names the marks, and whoever applies it finds the same ones, or refuses it, as with the
state's hash; so who comes later, without the old blobs, can read them. An author is *blamed* where
the scorers drawn for a commit agree that its contribution does harm (scoring.py). Either is a
strike. Two strikes among an author's last three listings exclude it for EXCLUSION_ROUNDS heights:
its work has weight 0, nobody expects it, it has no turn, and the next rosters are made without it.
Afterwards it is on probation. An honest outlier may be struck once by chance, hardly ever twice.

Whoever could have others excluded at will would own the run, so:
- nobody is struck in a commit of fewer than MIN_AUTHORS authors, and in no commit more than a
  quarter of them: who is wrong is a question of numbers;
- of no roster that holds is more than a quarter excluded: the rest can still be a quorum.
Rosters that hold are not changed by an exclusion: two quorums of one pair must keep meeting, also
where two branches disagree on who is excluded.

The lab plays whole runs without a chain with the same three calls: `Strikes()`, `is_excluded`
before a commit is weighed, `after` with what `weigh` has marked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

STRIKE_WINDOW = 3
"""Listings of an author that are remembered."""
STRIKES_TO_EXCLUDE = 2
EXCLUSION_ROUNDS = 24
"""Four hours of rounds of 600 s: long enough to make attacking worthless, short for who erred."""
PROBATION_ROUNDS = 5
"""Listed in fewer commits than this, or excluded lately, an author weighs less (DESIGN.md 4)."""
MIN_AUTHORS = 5
NOBODY: frozenset[str] = frozenset()
MAX_PART = 4
"""At most one in so many is struck in a commit, or excluded from a roster."""


@dataclass(frozen=True, slots=True)
class Strikes:
    """What a chain says of bad work at one commit. Never changes; `after` makes the next."""

    marks: Mapping[str, int] = field(default_factory=dict)
    """Author -> one bit for each of its last STRIKE_WINDOW listings, the newest lowest; none 0."""
    excluded_until: Mapping[str, int] = field(default_factory=dict)
    """Author -> last height at which it is excluded; kept until its probation is over."""

    def is_excluded(self, author: str, height: int) -> bool:
        """Return whether a commit of this height gives `author` no weight."""
        return height <= self.excluded_until.get(author, -1)

    def last_excluded(self, author: str, height: int) -> int | None:
        """Return the last height of the exclusion that holds at `height`; None: none does."""
        return self.excluded_until[author] if self.is_excluded(author, height) else None

    def excluded(self, height: int) -> frozenset[str]:
        """Return all whom a commit of this height gives no weight."""
        if not self.excluded_until:
            return NOBODY
        return frozenset(a for a, until in self.excluded_until.items() if height <= until)

    def is_on_probation(self, author: str, height: int) -> bool:
        """Return whether an exclusion has ended so lately that `author` weighs less."""
        return height <= self.excluded_until.get(author, -1 - PROBATION_ROUNDS) + PROBATION_ROUNDS

    def after(
        self,
        height: int,
        *,
        listed: Collection[str],
        marked: Collection[str] = (),
        blamed: Collection[str] = (),
        recent: Collection[str] | None = None,
        rosters: Collection[frozenset[str]] = (),
    ) -> Strikes:
        """Return the strikes after a commit.

        Args:
            height: the commit's.
            listed: the authors of what it lists.
            marked: those of them whose work it marks.
            blamed: authors of what its parent lists whose work that commit's scorers condemn.
            recent: authors whose strikes are remembered, `listed` among them; None: everybody.
            rosters: those that hold at the commit; nobody may be excluded beyond their quarter.
        """
        if not (self.marks or self.excluded_until or marked or blamed):
            return self
        marks = self._marks_after(height, listed, marked, blamed, recent)
        until = {a: h for a, h in self.excluded_until.items() if height < h + PROBATION_ROUNDS}
        for author in sorted(a for a, m in marks.items() if m.bit_count() >= STRIKES_TO_EXCLUDE):
            out = {a for a, h in until.items() if height < h} | {author}
            if all(_may_lose(roster, out, author) for roster in rosters):
                until[author] = height + EXCLUSION_ROUNDS
                del marks[author]
        return Strikes(marks, until)

    def _marks_after(
        self,
        height: int,
        listed: Collection[str],
        marked: Collection[str],
        blamed: Collection[str],
        recent: Collection[str] | None,
    ) -> dict[str, int]:
        """Return the bits after a commit: the last listing is blamed first, then comes this one."""
        marks = {a: m for a, m in self.marks.items() if recent is None or a in recent}
        for author in blamed:
            marks[author] = marks.get(author, 0) | 1
        for author in {*listed}:
            if author in marks or author in marked:
                bits = marks.get(author, 0) << 1 | (author in marked)
                marks[author] = bits & ((1 << STRIKE_WINDOW) - 1)
        return {a: m for a, m in marks.items() if m and not self.is_excluded(a, height)}


def max_struck(num_authors: int) -> int:
    """Return how many of a commit's authors may be struck for it."""
    return num_authors // MAX_PART if num_authors >= MIN_AUTHORS else 0


def _may_lose(roster: frozenset[str], out: set[str], author: str) -> bool:
    return author not in roster or MAX_PART * len(out & roster) <= len(roster)
