"""The workers of an arm, all on the same weights. Runs in: lab."""

from __future__ import annotations

from volunteer.lab.training.beginning import first_state
from volunteer.lab.training.shards import Sharding, shards_of
from volunteer.lab.training.strategy import RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.lab.training.worker import Worker
from volunteer.run import RunSpec
from volunteer.training.state import SharedState


class Crew:
    """K workers of one speed, and the clock that they train by."""

    def __init__(
        self, spec: RunSpec, task: LabTask, *, num_workers: int, sharding: Sharding, seed: int
    ) -> None:
        """Begin on the first state.

        Args:
            spec: of the arm.
            task: what is trained, and how long.
            num_workers: K.
            sharding: who reads what.
            seed: of the arm.
        """
        self.spec = spec
        self.num_steps = task.num_steps
        """When the last round ends."""
        self.step = 0
        """Nominal inner steps so far."""
        self.first: SharedState = first_state(task, seed)
        shards = shards_of(task, sharding, num_workers, seed)
        self.workers = [
            Worker(spec, shard, self.first.weights_P, seed=seed, index=index)
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
