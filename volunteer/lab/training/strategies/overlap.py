"""DiLoCo that goes on training while the exchange is in flight, and the control that must fail.

Runs in: lab.

Ours (docs/design/DESIGN.md section 3; training/pseudo_gradient.py has the formulas): a worker
contributes at the end of a round and trains on; `overlap_steps` later the commit arrives, and it
stands on the new weights with what it has learned meanwhile: theta <- G + (theta - P), P <- G.

    step   0 ....... H ....... 2 H          H = steps_a_round, tau = overlap_steps
    send             c0        c1
    apply              G1        G2         tau steps after each

The control delays the same exchange by a whole round and keeps nothing: at the end of round t the
mean of round t - 1 is applied and everybody begins on the result, so that the work of round t is
in no weights until the end of round t + 1:

    G_{t+1} = OuterOpt(G_t, mean D^{t-1});   theta <- G_{t+1}

It is the naive delay of arXiv:2502.12996 (its "delayed outer gradients"), which that paper, too,
finds clearly worse.

Both are measured with what is in flight applied, so that after n rounds the work of n rounds is in
the weights, as in DiLoCo. With tau = 0 the first is DiLoCo to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from volunteer.lab.training.exchange import Applied, apply_commit, listed_work
from volunteer.lab.training.strategies.crew import Crew, SharingPlan
from volunteer.lab.training.strategy import RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.lab.training.worker import Sent
from volunteer.training.state import SharedState


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapPlan(SharingPlan):
    """DiLoCo whose commit arrives some steps into the next round."""

    overlap_steps: int
    """tau, 0..steps_a_round."""

    def begin(self, task: LabTask, seed: int) -> Overlap:
        """Return the strategy before its first round."""
        return Overlap(self, task, seed)


class Overlap:
    """Shared weights, and at most one commit in flight."""

    def __init__(self, plan: OverlapPlan, task: LabTask, seed: int) -> None:
        """Begin on the first state."""
        self._crew = Crew(plan, task, seed)
        self._plan = plan
        self._state = self._crew.first
        """Of the newest commit, which may be in flight."""
        self._is_in_flight = False
        self._round = 0

    def weights(self) -> Tensor:
        """Return the shared weights, once what is in flight has arrived."""
        return self._state.weights_P

    def advance(self) -> RoundReport:
        """Train while the last exchange is in flight, stand on it, train on, contribute."""
        num_steps = self._crew.steps_left(self._plan.steps_a_round)
        overlap_steps = min(self._plan.overlap_steps, num_steps)
        num_tokens = self._crew.train(overlap_steps)
        self._arrive()
        num_tokens += self._crew.train(num_steps - overlap_steps)
        applied, total_bytes = commit_all(self._crew, self._state, self._round)
        self._state, self._is_in_flight = applied.state, True
        self._round += 1
        if self._plan.overlap_steps == 0:
            self._arrive()
        return self._crew.report(num_steps, num_tokens, total_bytes)

    def _arrive(self) -> None:
        if not self._is_in_flight:
            return
        for worker in self._crew.workers:
            worker.rebase(self.weights(), commit=str(self._round), round_index=self._round)
        self._is_in_flight = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedPlan(SharingPlan):
    """The control: every aggregate is applied a whole round late, and nothing is carried."""

    def begin(self, task: LabTask, seed: int) -> Delayed:
        """Return the strategy before its first round."""
        return Delayed(self, task, seed)


class Delayed:
    """Shared weights, and the commit that is always in flight."""

    def __init__(self, plan: DelayedPlan, task: LabTask, seed: int) -> None:
        """Begin on the first state."""
        self._crew = Crew(plan, task, seed)
        self._plan = plan
        self._next: SharedState = self._crew.first
        """With what is in flight applied: everybody will stand on it at the end of the round."""
        self._round = 0

    def weights(self) -> Tensor:
        """Return the shared weights, once what is in flight has arrived."""
        return self._next.weights_P

    def advance(self) -> RoundReport:
        """Train, contribute, and stand on what the round before gave."""
        num_steps = self._crew.steps_left(self._plan.steps_a_round)
        num_tokens = self._crew.train(num_steps)
        arrived = self._next
        applied, total_bytes = commit_all(self._crew, arrived, self._round)
        self._next = applied.state
        self._round += 1
        for worker in self._crew.workers:
            worker.rebase(arrived.weights_P, commit=str(self._round), round_index=self._round)
        return self._crew.report(num_steps, num_tokens, total_bytes)


def commit_all(crew: Crew, parent: SharedState, round_index: int) -> tuple[Applied, int]:
    """Let every worker contribute, and apply all of it; return the bytes of all blobs as well."""
    sent: list[Sent] = [
        worker.contribute(base=str(round_index), round_index=round_index) for worker in crew.workers
    ]
    outer = crew.spec.outer.at_round(round_index)
    applied = apply_commit(parent, sent, [listed_work(one) for one in sent], outer)
    for worker, one in zip(crew.workers, sent, strict=True):
        worker.forget((one.contribution_id,))
    return applied, sum(one.encoded.blob_bytes for one in sent)
