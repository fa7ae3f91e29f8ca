"""What a simulated member finds bad: the marks of its aggregation, and its verdicts as a scorer.

Runs in: simulation. Which blobs are bad is known here (`Contents`); what comes of marks and
verdicts is left to the real rules (exclusion.py, scoring.py, bad_work.py). Nothing is judged in a
scenario without lies about work: there no record has a mark or a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from volunteer.lab.simulation.trainer_model import Contents
from volunteer.rounds import events as ev
from volunteer.rounds.chain import active_at, listed_in_order
from volunteer.rounds.exclusion import max_struck
from volunteer.rounds.scoring import draw_scored, draw_scorers

if TYPE_CHECKING:
    from volunteer.lab.simulation.member import Member

SCORE_S = 4.0
"""To measure what was drawn of a commit's contributions."""


def marks_of(contents: Contents, listed: Sequence[ev.Listed]) -> tuple[str, ...]:
    """Return what the aggregation of `listed` marks, sorted: at most as much as may be."""
    if not contents.plainly_bad:
        return ()
    counted = [entry for entry in listed if not entry.is_excluded]
    limit = max_struck(len({entry.contribution.author for entry in counted}))
    bad = [entry for entry in counted if entry.contribution.blob_id in contents.plainly_bad]
    authors = list(dict.fromkeys(entry.contribution.author for entry in bad))[:limit]
    return tuple(sorted(e.contribution_id for e in bad if e.contribution.author in authors))


def is_scorer(member: Member, commit_id: str) -> bool:
    """Return whether a member is to score a commit that it has computed, as `Scorer.is_due`."""
    known = member.machine.known
    facts = known.facts.get(commit_id)
    if not member.contents.is_judged or facts is None or facts.height < known.highest_height:
        return False
    authors = {known.contributions[i].author for i in facts.listed}
    can_blame = member.is_contributing and max_struck(len(authors)) > 0
    return can_blame and member.me in draw_scorers(commit_id, active_at(member.rules, facts))


def verdict_on(member: Member, commit_id: str) -> tuple[str, ...] | None:
    """Return what a scorer names of a commit's contributions, sorted; None: it was forgotten.

    Who tells false verdicts names the work of honest members, and never that of its fellows.
    """
    known = member.machine.known
    commit = known.commits.get(commit_id)
    if commit is None:
        return None
    listed = listed_in_order(commit.contributions, known.facts[commit.parent], known.contributions)
    drawn = draw_scored(commit_id, commit.contributions)
    measured = [e for e in listed if e.contribution_id in drawn and not e.is_excluded]
    others = [e for e in measured if e.contribution.author != member.me]
    liar = member.liar
    if liar is not None and liar.does("false-verdicts"):
        named = [e for e in others if not liar.is_fellow(e.contribution.author)]
    else:  # what the aggregation has marked has no weight, and is not measured
        named = [e for e in others if e.contribution.blob_id in member.contents.harmful]
    return tuple(sorted(e.contribution_id for e in named))
