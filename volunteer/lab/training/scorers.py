"""The scorers of a commit, played: who is drawn, what they measure, and what they say.

Runs in: lab.

As volunteer/agent/scorer.py has it, with the same draws, windows and thresholds. All honest scorers
compute the same here, so each contribution is measured once. An attacker who is drawn says that
nothing does harm, which is the most that he can do for the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from torch import Tensor

from volunteer.lab.training.worker import Sent
from volunteer.messages import Outcome
from volunteer.rounds.exclusion import max_struck
from volunteer.rounds.scoring import draw_scored, draw_scorers, is_harmful
from volunteer.run import RunSpec
from volunteer.training.scoring import score_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What the scorers of one commit say."""

    authors: Mapping[str, str] = field(default_factory=dict)
    """Contribution that the commit lists -> its author."""
    scorers: tuple[str, ...] = ()
    harmful: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Scorer -> contributions that it names, perhaps none."""


def reach_verdicts(
    spec: RunSpec,
    parent_P: Tensor,
    sent: Sequence[Sent],
    outcomes: Sequence[Outcome],
    *,
    height: int,
    members: Collection[str],
    liars: Collection[str],
) -> Verdicts:
    """Return what the scorers of a commit find.

    Args:
        spec: of the arm.
        parent_P: the shared weights that the contributions were made on, shape (P,).
        sent: what the commit lists, in list order.
        outcomes: what became of each.
        height: the commit's.
        members: everyone who takes part.
        liars: attackers among them.
    """
    authors = {one.contribution_id: one.author for one in sent}
    if not max_struck(len({*authors.values()})):
        return Verdicts()
    name = f"allmende/lab/commit/{spec.genesis.seed}/{height}"
    commit_id = blake3(name.encode()).hexdigest()
    harmful = _harmful(spec, parent_P, sent, outcomes, commit_id) | _late_copies(sent, outcomes)
    scorers = draw_scorers(commit_id, members)
    return Verdicts(
        authors=authors,
        scorers=scorers,
        harmful={
            scorer: frozenset(
                one for one in harmful if scorer not in liars and authors[one] != scorer
            )
            for scorer in scorers
        },
    )


def _harmful(
    spec: RunSpec,
    parent_P: Tensor,
    sent: Sequence[Sent],
    outcomes: Sequence[Outcome],
    commit_id: str,
) -> frozenset[str]:
    """Return which of the contributions that are drawn raise the loss."""
    drawn = draw_scored(commit_id, [one.contribution_id for one in sent])
    todo = [
        (one, outcome.clip_scale)
        for one, outcome in zip(sent, outcomes, strict=True)
        if one.contribution_id in drawn and outcome.weight > 0.0
    ]
    blobs = [(one.gradient, scale) for one, scale in todo]
    scores = score_run(spec, parent_P, blobs, commit_id, None, should_stop=lambda: False)
    return frozenset(
        one.contribution_id
        for (one, _), score in zip(todo, scores, strict=True)
        if is_harmful(score.change, score.stderr, score.loss)
    )


def _late_copies(sent: Sequence[Sent], outcomes: Sequence[Outcome]) -> frozenset[str]:
    """Return which are the same as another one that was there before."""
    return frozenset(
        one.contribution_id
        for one, outcome in zip(sent, outcomes, strict=True)
        if one.copy_of in outcome.copies
    )
