"""The workers of an arm, all on the same weights, and what their plans have in common.

Runs in: lab.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from volunteer.lab.training.beginning import first_state
from volunteer.lab.training.shards import Sharding, shards_of
from volunteer.lab.training.strategies.diloco import FP32, NESTEROV
from volunteer.lab.training.strategy import Plan, RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.lab.training.worker import Worker
from volunteer.run import CodecSpec, OuterSpec, RunSpec
from volunteer.training.state import SharedState


class CrewPlan(Plan, Protocol):
    """A plan whose workers are there from the first round to the last."""

    @property
    def num_workers(self) -> int:
        """K."""

    @property
    def sharding(self) -> Sharding:
        """Who reads what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingPlan:
    """K workers that share every H steps, by one outer optimizer and one codec.

    What the plans of several strategies have in common; each adds its own, and `begin`.
    """

    num_workers: int
    steps_a_round: int
    """H: from one exchange to the next of the same weights."""
    outer: OuterSpec = NESTEROV
    codec: CodecSpec = FP32
    sharding: Sharding = "shared"

    def spec(self, task: LabTask, seed: int) -> RunSpec:
        """Return the RunSpec."""
        return task.run_spec(seed, outer=self.outer, codec=self.codec)


class Crew:
    """K workers of one speed, and the clock that they train by."""

    def __init__(self, plan: CrewPlan, task: LabTask, seed: int) -> None:
        """Begin on the first state.

        Args:
            plan: of the arm.
            task: what is trained, and how long.
            seed: of the arm.
        """
        self.spec: RunSpec = plan.spec(task, seed)
        self.num_steps = task.num_steps
        """When the last round ends."""
        self.step = 0
        """Nominal inner steps so far."""
        self.first: SharedState = first_state(task, seed)
        shards = shards_of(task, plan.sharding, plan.num_workers, seed)
        self.workers = [
            Worker(self.spec, shard, self.first.weights_P, seed=seed, index=index)
            for index, shard in enumerate(shards)
        ]

    def steps_left(self, at_most: int) -> int:
        """Return how many of a round's steps there is still time for."""
        return min(at_most, self.num_steps - self.step)

    def train(self, num_steps: int) -> int:
        """Let every worker take inner steps; return the tokens that all trained."""
        num_tokens = sum(
            worker.train(num_steps, clock=self.step, clock_steps=num_steps)
            for worker in self.workers
        )
        self.step += num_steps
        return num_tokens

    def report(
        self, num_steps: int, num_tokens: int, total_bytes: int, notes: tuple[str, ...] = ()
    ) -> RoundReport:
        """Return what a round came to.

        Args:
            num_steps: of the round.
            num_tokens: trained in it by all.
            total_bytes: sent in it by all.
            notes: what happened.
        """
        return RoundReport(
            num_steps=num_steps,
            num_tokens=num_tokens,
            bytes_sent=total_bytes / len(self.workers),
            notes=notes,
        )
