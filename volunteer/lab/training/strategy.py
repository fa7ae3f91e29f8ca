"""What a strategy is: how workers share what they learn, one round after the other.

Runs in: lab. Pure.

A *plan* is a frozen dataclass with all that makes one strategy differ from another; it begins a
*strategy*, which holds the workers. A plan's fields make its fingerprint (results.py), so that
results of other settings are never mixed; a field added later needs a default.

A new strategy is one source file in strategies/ with a plan and a strategy, and arms in
experiments/ that use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from volunteer.lab.training.task import LabTask
from volunteer.run import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """What one round came to."""

    num_steps: int
    """Nominal inner steps of the round: how far the clock went."""
    num_tokens: int
    """Trained in the round by all workers together."""
    bytes_sent: float
    """Mean over the workers: what each has to send once (its contribution, its gradients), however
    many others it reaches or whoever passes it on."""
    notes: tuple[str, ...] = ()
    """What happened, in a word or two each: `excluded worker-6`."""


class Strategy(Protocol):
    """All workers of one arm, in the middle of their training."""

    def weights(self) -> Tensor:
        """Return the weights that are measured, fp32, shape (P,): the shared ones, or their mean.

        Those of the genesis state before the first round.
        """

    def advance(self) -> RoundReport:
        """Let all workers train and share once.

        Raises:
            VolunteerError: training broke down (it diverged); the arm ends there.
        """


class Plan(Protocol):
    """How an arm is trained; a frozen dataclass."""

    def spec(self, task: LabTask, seed: int) -> RunSpec:
        """Return the RunSpec of the arm, as `task.run_spec` makes it."""

    def begin(self, task: LabTask, seed: int) -> Strategy:
        """Return the strategy before its first round.

        Args:
            task: what is trained, and how long: a strategy ends its last round at `num_steps`.
            seed: makes the first weights, the data's order and all other chance.
        """
