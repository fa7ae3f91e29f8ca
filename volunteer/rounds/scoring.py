"""Which members score a commit's contributions, and when their verdicts count.

Runs in: agent, simulation. Pure.

What arithmetic on the blobs cannot tell, members who look at the data can: whether a contribution
makes the held-out loss worse, and whether it was there only after another one that it copies.
Their machines differ in the last bits, so only signed verdicts count. For each commit NUM_SCORERS
of its active members are drawn by its id. A scorer measures NUM_SCORED contributions, drawn
likewise, so that all measure the same, and names those that do harm in its next contribution.

An author is blamed where at least MIN_AGREEING scorers of the commit name its contribution, in
verdicts that the child lists, and those are AGREEING_PART of all that others have on it. So:
- two liars can have nobody blamed, whoever stays away; more can only where three of them are drawn:
  of three in twelve 4.5 % of commits, of a quarter of 32 8.5 %, of a quarter of any run under
  10.4 %; with all five verdicts there, they can then blame none but one who was drawn with them;
- of two who copy and cover each other, at most one has a say on either: not enough to save it
  from three honest scorers, so two of eight never escape, whoever is drawn;
- scorers that stay away delay nothing, and two of the five may.

Paper: arXiv:2505.21684 (Gauntlet), section 3: L(G) - L(G - a c) on held-out and assigned data.
Differs: verdicts instead of a rating, drawn members instead of validators that are trusted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec
from blake3 import blake3

from volunteer.rounds.exclusion import max_struck
from volunteer.rounds.records import Contribution

NUM_SCORERS = 5
NUM_SCORED = 4
"""Contributions that a scorer measures; each takes an evaluation of its own."""
MIN_AGREEING = 3
"""Also where few are active: of five authors four can judge one, and fewer are never struck."""
AGREEING_PART = (3, 4)
HARM_SIGMAS = 3.0
"""Standard errors by which a contribution has to raise the loss to be called harmful."""
HARM_FRACTION = 2e-4
"""And this part of the loss: with many windows, less would be noticed than matters."""


def draw_scorers(commit_id: str, members: Iterable[str]) -> tuple[str, ...]:
    """Return who scores what a commit lists, of the members that are active at it."""
    return _draw(b"scorer", commit_id, members, NUM_SCORERS)


def draw_scored(commit_id: str, listed: Iterable[str]) -> tuple[str, ...]:
    """Return which of the contributions that a commit lists are measured for it."""
    return _draw(b"scored", commit_id, listed, NUM_SCORED)


def is_harmful(change: float, stderr: float, loss: float) -> bool:
    """Judge one contribution by what it alone does to the loss (training/scoring.py)."""
    return change > HARM_SIGMAS * stderr and change > HARM_FRACTION * loss


def _draw(purpose: bytes, commit_id: str, names: Iterable[str], count: int) -> tuple[str, ...]:
    # The commit's own id, which nobody knows before its contributions are fixed.
    context = b"allmende/" + purpose + b"/1\x00"

    def lot(name: str) -> bytes:
        return blake3(context + f"{commit_id}/{name}".encode()).digest()

    return tuple(sorted(names, key=lambda name: (lot(name), name))[:count])


def blamed_authors(
    authors: Mapping[str, str],
    verdicts: Iterable[Contribution],
    scorers: Collection[str],
) -> frozenset[str]:
    """Return whose work the scorers of a commit condemn.

    Args:
        authors: contribution that the commit lists -> its author.
        verdicts: contributions on the commit that its child lists.
        scorers: who was drawn for it.
    """
    harmful = {
        record.author: frozenset(record.harmful)
        for record in verdicts
        if record.harmful is not msgspec.UNSET and record.author in scorers
    }
    part, over = AGREEING_PART
    blamed = set()
    for contribution_id, author in authors.items():
        named = [contribution_id in found for who, found in harmful.items() if who != author]
        if sum(named) >= MIN_AGREEING and sum(named) * over >= len(named) * part:
            blamed.add(author)
    # Where more seem wrong than may be, the scorers are.
    is_plausible = len(blamed) <= max_struck(len({*authors.values()}))
    return frozenset(blamed) if is_plausible else frozenset()
