"""Eager updates: a whole round's exchange is hidden, since one's own work is applied at once.

Runs in: lab.

At the end of round t a worker knows its own pseudo-gradient of this round, and everybody's of the
round before, whose exchange took all of this round. It steps with both:

    g_i = (1/K) D_i^t + (1/K) sum over j != i of D_j^{t-1}
    G_i, m_i = OuterOpt(G_i, m_i, g_i);   theta_i <- G_i

so that the G_i differ between workers, by their own last displacement, and never part for good.

Paper: arXiv:2502.12996, the eager variant; the formula as in docs/design/ALGORITHMS.md section 7,
where it is marked as from memory. The paper's body was not to be had here, so no equation of it is
quoted by number. Differs: contributions go through the arm's codec with its error feedback, and
what a worker applies of its own is the decoded contribution, as the others will.

Measured are the mean of the G_i. In round 0 nothing has arrived: D^{-1} = 0. With K = 1 there is
nobody to wait for, and it is DiLoCo.

Shape legend: P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from volunteer.lab.training.strategies.crew import Crew, SharingPlan
from volunteer.lab.training.strategy import RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.lab.training.worker import mean_of
from volunteer.training import compression
from volunteer.training.outer import outer_step
from volunteer.training.state import SharedState


def eager_gradient(
    own_fresh_P: Tensor, own_stale_P: Tensor, mean_stale_P: Tensor, num_workers: int
) -> Tensor:
    """Return g_i, as mean D^{t-1} + (1/K) (D_i^t - D_i^{t-1}).

    Args:
        own_fresh_P: D_i^t, shape (P,).
        own_stale_P: D_i^{t-1}, same shape.
        mean_stale_P: mean over all workers of D_j^{t-1}, the own one included.
        num_workers: K.
    """
    own_64 = own_fresh_P.to(torch.float64) - own_stale_P.to(torch.float64)
    return (mean_stale_P.to(torch.float64) + own_64 / num_workers).to(own_fresh_P.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerPlan(SharingPlan):
    """K workers whose exchange takes as long as a round."""

    def begin(self, task: LabTask, seed: int) -> Eager:
        """Return the strategy before its first round."""
        return Eager(self, task, seed)


class Eager:
    """A state for each worker, and the contributions that are in flight."""

    def __init__(self, plan: EagerPlan, task: LabTask, seed: int) -> None:
        """Begin on the first state."""
        self._crew = Crew(plan, task, seed)
        self._plan = plan
        first = self._crew.first
        self._states = [first for _ in self._crew.workers]
        self._stale: Sequence[Tensor] = [
            torch.zeros_like(first.weights_P) for _ in self._crew.workers
        ]
        """D^{t-1} of every worker, decoded."""
        self._round = 0

    def weights(self) -> Tensor:
        """Return the mean of the workers' own shared weights."""
        return mean_of([state.weights_P for state in self._states])

    def advance(self) -> RoundReport:
        """Train, contribute, and step with one's own fresh work and the others' stale."""
        num_steps = self._crew.steps_left(self._plan.steps_a_round)
        num_tokens = self._crew.train(num_steps)
        fresh, total_bytes = self._contribute()
        mean_stale_P = mean_of(list(self._stale))
        outer = self._crew.spec.outer.at_round(self._round)
        self._round += 1
        for i, worker in enumerate(self._crew.workers):
            gradient_P = eager_gradient(
                fresh[i], self._stale[i], mean_stale_P, self._plan.num_workers
            )
            state = self._states[i]
            weights_P, momentum_P = outer_step(state.weights_P, state.momentum_P, gradient_P, outer)
            self._states[i] = SharedState(weights_P=weights_P, momentum_P=momentum_P)
            worker.rebase(weights_P, commit=str(self._round), round_index=self._round)
        self._stale = fresh
        return self._crew.report(num_steps, num_tokens, total_bytes)

    def _contribute(self) -> tuple[list[Tensor], int]:
        """Return every worker's decoded contribution, and the bytes of all."""
        fresh, total_bytes = [], 0
        for worker in self._crew.workers:
            sent = worker.contribute(base=str(self._round), round_index=self._round)
            worker.forget((sent.contribution_id,))
            fresh.append(compression.decode(sent.gradient))
            total_bytes += sent.encoded.blob_bytes
        return fresh, total_bytes
