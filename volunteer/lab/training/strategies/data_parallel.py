"""Data-parallel training: one optimizer, K times the batch, gradients shared in every step.

Runs in: lab. The comparison that DiLoCo has to bear. K = 1 is a single worker.

The K data streams are those of the K workers of the other strategies, read in the same order: in
the end all have seen the same windows, if their steps are equally many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from volunteer.lab.training.beginning import first_state
from volunteer.lab.training.shards import Sharding, shards_of
from volunteer.lab.training.strategy import RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.lab.training.worker import Worker
from volunteer.run import CodecSpec, OuterSpec, RunSpec

_GRADIENT_BYTES = 4  # fp32, the textbook's


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelPlan:
    """K workers that act as one; nothing else to choose."""

    num_workers: int
    sharding: Sharding = "shared"
    steps_a_round: int = 10
    """Between two reports; the training does not depend on it."""

    def spec(self, task: LabTask, seed: int) -> RunSpec:
        """Return the RunSpec; neither codec nor outer optimizer is used."""
        return task.run_spec(seed, outer=OuterSpec(), codec=CodecSpec(id="fp32"))

    def begin(self, task: LabTask, seed: int) -> DataParallel:
        """Return the strategy before its first step."""
        return DataParallel(self, task, seed)


class DataParallel:
    """One set of weights and moments; the gradient is the mean over K batches."""

    def __init__(self, plan: DataParallelPlan, task: LabTask, seed: int) -> None:
        """Begin on the first state."""
        spec = plan.spec(task, seed)
        weights_P = first_state(task, seed).weights_P
        shards = shards_of(task, plan.sharding, plan.num_workers, seed)
        self._workers = [
            Worker(spec, shard, weights_P, seed=seed, index=index)
            for index, shard in enumerate(shards)
        ]
        """All but the first only read data."""
        self._plan = plan
        self._num_steps = task.num_steps
        self._step = 0

    def weights(self) -> Tensor:
        """Return the weights."""
        return self._workers[0].theta_P

    def advance(self) -> RoundReport:
        """Take some steps."""
        num_steps = min(self._plan.steps_a_round, self._num_steps - self._step)
        num_tokens = 0
        for step in range(self._step, self._step + num_steps):
            windows_BT1 = torch.cat([worker.windows(step) for worker in self._workers])
            self._workers[0].take_step(windows_BT1, clock=step)
            num_tokens += windows_BT1.shape[0] * (windows_BT1.shape[1] - 1)
        self._step += num_steps
        is_alone = self._plan.num_workers == 1
        num_bytes = 0 if is_alone else _GRADIENT_BYTES * self.weights().numel() * num_steps
        return RoundReport(num_steps=num_steps, num_tokens=num_tokens, bytes_sent=float(num_bytes))
