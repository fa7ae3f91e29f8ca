"""What a commit does to the shared state, in memory: the aggregator's functions, in its order.

Runs in: lab. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from volunteer.lab.training.worker import Sent
from volunteer.messages import ListedWork, Outcome
from volunteer.run import OuterSpec
from volunteer.training.aggregation import judge, next_state_slices
from volunteer.training.state import SharedState


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Applied:
    """The state after a commit, and what became of each contribution, in list order."""

    state: SharedState
    outcomes: tuple[Outcome, ...]


def listed_work(sent: Sent, *, is_late: bool = False, is_uniform: bool = False) -> ListedWork:
    """Return a contribution as a commit lists it.

    Args:
        sent: the contribution.
        is_late: made on an older commit than the parent.
        is_uniform: weigh all alike, whatever they trained; the program never does.
    """
    return ListedWork(
        contribution_id=sent.contribution_id,
        author=sent.author,
        round_index=sent.encoded.round_index,
        blob_id=sent.encoded.blob_id,
        tokens=1 if is_uniform else sent.encoded.tokens,
        is_late=is_late,
        is_on_probation=False,
    )


def apply_commit(
    parent: SharedState, sent: Sequence[Sent], listed: Sequence[ListedWork], outer: OuterSpec
) -> Applied:
    """Judge, combine, and take the outer step.

    Args:
        parent: not changed.
        sent: what is listed, in list order.
        listed: the same, as the chain says.
        outer: of the round (`OuterSpec.at_round`).
    """
    gradients = [one.gradient for one in sent]
    outcomes = judge(gradients, listed)
    weights_P = torch.empty_like(parent.weights_P)
    momentum_P = torch.empty_like(parent.momentum_P)
    for piece in next_state_slices(parent, gradients, outcomes, outer):
        stop = piece.start + len(piece.weights_S)
        weights_P[piece.start : stop] = piece.weights_S
        momentum_P[piece.start : stop] = piece.momentum_S
    return Applied(state=SharedState(weights_P=weights_P, momentum_P=momentum_P), outcomes=outcomes)
