"""NoLoCo: no exchange among all, only within random pairs; every replica keeps weights of its own.

Runs in: lab.

A replica i has slow weights phi_i and a momentum d_i. After its inner steps it exchanges both its
displacement and its slow weights with one other, which a seed chooses for everybody:

    Dl_i  = theta_i - phi_i
    d_i   = alpha * d_i + (beta / n) * sum_j Dl_j - gamma * (phi_i - (1 / n) * sum_j phi_j)
    phi_i = phi_i + d_i;   theta_i <- phi_i                       sums over the n = 2 of the pair

Paper: arXiv:2506.10911, the modified Nesterov step; signs as in the authors' code (the paper prints
-beta), both by way of docs/design/ALGORITHMS.md section 8: the paper was not opened again here, so
no equation is quoted by its number. In our sign D = -Dl and m = -d:

    m_i = alpha * m_i + beta * mean(D) + gamma * (phi_i - mean(phi));   phi_i = phi_i - m_i

Differs: with an odd number of replicas one stays alone in a round (its pair is itself); the
displacement goes through the arm's codec, with its error feedback; slow weights are sent in fp32.

Measured is the mean of the slow weights: no replica has it before all of them are averaged once, at
the end. The last round notes how far the replicas stand from it.

Shape legend: P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from volunteer.lab.training.shards import Sharding
from volunteer.lab.training.strategies.crew import Crew
from volunteer.lab.training.strategies.diloco import FP32
from volunteer.lab.training.strategy import RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.lab.training.worker import mean_of
from volunteer.run import CodecSpec, OuterSpec, RunSpec
from volunteer.training import compression

_SLOW_BYTES = 4  # an element of the slow weights, fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class NolocoSpec:
    """The outer step of a pair; defaults are the authors'."""

    alpha: float = 0.5
    """Of the old momentum."""
    beta: float = 0.7
    """Of the pair's mean displacement."""
    gamma: float = 0.7
    """Of the pull towards the pair's mean slow weights."""


def draw_pairs(num_workers: int, *, seed: int, round_index: int) -> tuple[tuple[int, ...], ...]:
    """Return who exchanges with whom in a round: pairs, and one alone if the number is odd.

    Everybody computes the same from the shared seed, and no two need to agree on anything.
    """
    order = np.random.default_rng((seed, round_index)).permutation(num_workers)
    members = [int(worker) for worker in order]
    return tuple(tuple(members[i : i + 2]) for i in range(0, num_workers, 2))


def noloco_step(
    slow_P: Tensor,
    momentum_P: Tensor,
    mean_gradient_P: Tensor,
    mean_slow_P: Tensor,
    noloco: NolocoSpec,
) -> tuple[Tensor, Tensor]:
    """Take one replica's outer step.

    Args:
        slow_P: phi_i, shape (P,); not changed.
        momentum_P: m_i, same shape; not changed.
        mean_gradient_P: mean of the pair's pseudo-gradients D = phi - theta.
        mean_slow_P: mean of the pair's slow weights, before this step.
        noloco: the numbers.

    Returns:
        The new phi_i and m_i, in the dtype of the old ones, computed in fp64.
    """
    slow_64, momentum_64 = slow_P.to(torch.float64), momentum_P.to(torch.float64)
    pull_64 = slow_64 - mean_slow_P.to(torch.float64)
    new_64 = noloco.alpha * momentum_64 + noloco.beta * mean_gradient_P.to(torch.float64)
    new_64 += noloco.gamma * pull_64
    return (slow_64 - new_64).to(slow_P.dtype), new_64.to(momentum_P.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class NolocoPlan:
    """K replicas that exchange in pairs."""

    num_workers: int
    steps_a_round: int
    noloco: NolocoSpec = NolocoSpec()
    codec: CodecSpec = FP32
    sharding: Sharding = "shared"

    def spec(self, task: LabTask, seed: int) -> RunSpec:
        """Return the RunSpec; its outer optimizer is not used."""
        return task.run_spec(seed, outer=OuterSpec(), codec=self.codec)

    def begin(self, task: LabTask, seed: int) -> Noloco:
        """Return the strategy before its first round."""
        return Noloco(self, task, seed)


class Noloco:
    """Slow weights and a momentum for each replica."""

    def __init__(self, plan: NolocoPlan, task: LabTask, seed: int) -> None:
        """Begin on the first state."""
        self._plan = plan
        self._seed = seed
        self._crew = Crew(plan, task, seed)
        first_P = self._crew.first.weights_P
        self._slow = [first_P for _ in self._crew.workers]
        self._momenta = [torch.zeros_like(first_P) for _ in self._crew.workers]
        self._round = 0

    def weights(self) -> Tensor:
        """Return the mean of the slow weights."""
        return mean_of(self._slow)

    def advance(self) -> RoundReport:
        """Train, and exchange within pairs."""
        num_steps = self._crew.steps_left(self._plan.steps_a_round)
        num_tokens = self._crew.train(num_steps)
        gradients, total_bytes = [], 0
        for worker in self._crew.workers:
            sent = worker.contribute(base=str(self._round), round_index=self._round)
            worker.forget((sent.contribution_id,))
            gradients.append(compression.decode(sent.gradient))
            total_bytes += sent.encoded.blob_bytes + _SLOW_BYTES * len(self._slow[0])
        groups = draw_pairs(self._plan.num_workers, seed=self._seed, round_index=self._round)
        self._round += 1
        for group in groups:
            self._exchange(group, gradients)
        is_last = self._crew.step == self._crew.num_steps
        notes = (f"replica spread {relative_spread(self._slow):.4f}",) if is_last else ()
        return self._crew.report(num_steps, num_tokens, total_bytes, notes=notes)

    def _exchange(self, group: tuple[int, ...], gradients: list[Tensor]) -> None:
        mean_gradient_P = mean_of([gradients[i] for i in group])
        mean_slow_P = mean_of([self._slow[i] for i in group])
        for i in group:
            self._slow[i], self._momenta[i] = noloco_step(
                self._slow[i], self._momenta[i], mean_gradient_P, mean_slow_P, self._plan.noloco
            )
            self._crew.workers[i].rebase(
                self._slow[i], commit=f"{i}/{self._round}", round_index=self._round
            )


def relative_spread(replicas: list[Tensor]) -> float:
    """Return the root mean square distance of replicas from their mean, over the mean's norm."""
    mean_P = mean_of(replicas).to(torch.float64)
    squares = [float((replica - mean_P).square().sum()) for replica in replicas]
    return float((sum(squares) / len(replicas)) ** 0.5 / mean_P.norm())
