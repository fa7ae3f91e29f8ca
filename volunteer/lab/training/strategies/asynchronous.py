"""Asynchronous local SGD: nobody waits; each contribution is applied when it arrives.

Runs in: lab, in virtual time that the workers' speeds make.

Applied one after the other, K contributions move the momentum K times. The delayed Nesterov step
moves it once in N arrivals, and applies what arrives meanwhile without it:

    B = B + g
    every N-th arrival:   m = mu * m + B / N;  G = G - lr * ((1 - c N + c) * mu * m + g / N);  B = 0
    the others:                                G = G - lr * (c * mu * m + g / N)

Paper: arXiv:2401.09135, delayed Nesterov (DN) and dynamic local updates (DyLU: a worker takes
floor(v / max v * H) steps, so that all are done at about the same time); the formulas as in
docs/design/ALGORITHMS.md section 10 (read in the paper there; the body was not to be had here, so
no equation is quoted by its number). Virtual time, and the grace period in which near-simultaneous
arrivals wait for each other before they begin anew, as in google-deepmind/asyncdiloco,
AsyncLocalSGDToyExample.ipynb (`AsyncExperiment`, read); `naive` is its `vanilla` with its weight
sqrt(K) / K a contribution, which the paper finds worse.
Differs: workers keep their data streams (the paper samples shards by progress).

A round is as many steps of all workers together as K workers of nominal speed take in H: arms are
compared at equal tokens. With N = K, c = 0 and equal speeds DN is DiLoCo, with N = 1 Nesterov.

Shape legend: P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from volunteer.errors import ConfigError
from volunteer.lab.training.shards import Sharding
from volunteer.lab.training.strategies.crew import Crew
from volunteer.lab.training.strategies.diloco import FP32, NESTEROV
from volunteer.lab.training.strategy import RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.run import CodecSpec, OuterSpec, RunSpec
from volunteer.training import compression
from volunteer.training.outer import outer_step


@dataclass(frozen=True, slots=True, eq=False)
class DelayedState:
    """What the delayed Nesterov step works on; shape (P,) each, fp32."""

    weights_P: Tensor
    momentum_P: Tensor
    buffer_P: Tensor
    """B: what has arrived since the momentum moved."""
    num_arrivals: int
    """Ever."""


def delayed_nesterov_step(
    state: DelayedState, gradient_P: Tensor, outer: OuterSpec, *, every: int, c: float = 0.0
) -> DelayedState:
    """Apply one arrival.

    Args:
        state: not changed.
        gradient_P: g, what arrived, with the pseudo-gradient's sign, shape (P,).
        outer: lr and mu.
        every: N, arrivals from one move of the momentum to the next.
        c: how much of the momentum each arrival uses, 0..1/N; the paper's default is 0.

    Returns:
        The new state, computed in fp64.
    """
    g_64 = gradient_P.to(torch.float64)
    momentum_64, buffer_64 = state.momentum_P.to(torch.float64), state.buffer_P.to(torch.float64)
    buffer_64 = buffer_64 + g_64
    share = c
    if (state.num_arrivals + 1) % every == 0:
        momentum_64 = outer.momentum * momentum_64 + buffer_64 / every
        buffer_64 = torch.zeros_like(buffer_64)
        share = 1.0 - c * every + c
    step_64 = outer.lr * (share * outer.momentum * momentum_64 + g_64 / every)
    dtype = state.weights_P.dtype
    return DelayedState(
        weights_P=(state.weights_P.to(torch.float64) - step_64).to(dtype),
        momentum_P=momentum_64.to(dtype),
        buffer_P=buffer_64.to(dtype),
        num_arrivals=state.num_arrivals + 1,
    )


def dynamic_steps(speeds: Sequence[float], steps_a_round: int) -> tuple[int, ...]:
    """Return the inner steps of each worker by its speed (DyLU): H for the fastest, 1 at least."""
    fastest = max(speeds)
    return tuple(max(1, math.floor(speed / fastest * steps_a_round)) for speed in speeds)


def next_arrivals(done_at: Sequence[float], grace: float) -> tuple[int, ...]:
    """Return who arrives next, in order: the first, and all within `grace` of it.

    Args:
        done_at: when each worker is done, in virtual time.
        grace: how long those who are done wait for others, in virtual time.
    """
    order = sorted(range(len(done_at)), key=lambda worker: (done_at[worker], worker))
    last = done_at[order[0]] + grace
    return tuple(worker for worker in order if done_at[worker] <= last)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncPlan:
    """Workers of given speeds, none of which waits for another."""

    speeds: tuple[float, ...]
    """Inner steps in a unit of virtual time, one a worker."""
    steps_a_round: int
    """H: of the fastest between two contributions."""
    rule: Literal["delayed_nesterov", "naive"] = "delayed_nesterov"
    every: int = 0
    """N of the delayed Nesterov step; 0: the number of workers."""
    c: float = 0.0
    is_dynamic: bool = True
    """Whether the slow take fewer steps (DyLU), instead of contributing more rarely."""
    grace: float = 0.0
    """In virtual time."""
    outer: OuterSpec = NESTEROV
    codec: CodecSpec = FP32
    sharding: Sharding = "shared"

    def __post_init__(self) -> None:
        """Check the speeds.

        Raises:
            ConfigError: none, or one that is not above 0.
        """
        if not self.speeds or min(self.speeds) <= 0:
            raise ConfigError("speeds: one above 0 for each worker")

    @property
    def num_workers(self) -> int:
        """As many as there are speeds."""
        return len(self.speeds)

    def spec(self, task: LabTask, seed: int) -> RunSpec:
        """Return the RunSpec."""
        return task.run_spec(seed, outer=self.outer, codec=self.codec)

    def begin(self, task: LabTask, seed: int) -> Asynchronous:
        """Return the strategy at time 0."""
        return Asynchronous(self, task, seed)


class Asynchronous:
    """Shared weights, and workers that stand on older ones."""

    def __init__(self, plan: AsyncPlan, task: LabTask, seed: int) -> None:
        """Begin on the first state."""
        self._plan = plan
        self._crew = Crew(plan, task, seed)
        first = self._crew.first
        self._state = DelayedState(
            weights_P=first.weights_P,
            momentum_P=first.momentum_P,
            buffer_P=torch.zeros_like(first.weights_P),
            num_arrivals=0,
        )
        self._steps = (
            dynamic_steps(plan.speeds, plan.steps_a_round)
            if plan.is_dynamic
            else (plan.steps_a_round,) * len(plan.speeds)
        )
        self._took = [n / v for n, v in zip(self._steps, plan.speeds, strict=True)]
        """How long each worker trains for a contribution, in virtual time."""
        self._done_at = list(self._took)
        self._began_at = [0] * len(plan.speeds)
        """The learning rate's clock when each worker began."""
        self._total_steps = 0
        """Inner steps of all workers together."""

    def weights(self) -> Tensor:
        """Return the shared weights."""
        return self._state.weights_P

    def advance(self) -> RoundReport:
        """Go on until all workers together have taken a round's steps more, or a few above."""
        before = self._crew.step
        target = (before + self._crew.steps_left(self._plan.steps_a_round)) * len(self._steps)
        num_tokens = total_bytes = 0
        while self._total_steps < target:
            arrived = next_arrivals(self._done_at, self._plan.grace)
            for index in arrived:
                tokens, num_bytes = self._arrive(index)
                num_tokens += tokens
                total_bytes += num_bytes
            self._begin_anew(arrived)
        self._crew.step = min(self._crew.num_steps, self._total_steps // len(self._steps))
        return self._crew.report(self._crew.step - before, num_tokens, total_bytes)

    def _arrive(self, index: int) -> tuple[int, int]:
        """Train what a worker has trained by now, and apply it; return its tokens and bytes.

        What it read and what it stands on was settled when it began, so that it can be computed
        now, in the order of arrival.
        """
        worker, num_steps = self._crew.workers[index], self._steps[index]
        nominal_speed = sum(self._plan.speeds) / len(self._steps)
        tokens = worker.train(
            num_steps,
            clock=self._began_at[index],
            clock_steps=round(self._took[index] * nominal_speed),
        )
        self._total_steps += num_steps
        number = self._state.num_arrivals
        sent = worker.contribute(base=str(number), round_index=number // len(self._steps))
        worker.forget((sent.contribution_id,))
        self._state = self._applied(compression.decode(sent.gradient))
        return tokens, sent.encoded.blob_bytes

    def _applied(self, gradient_P: Tensor) -> DelayedState:
        num_workers = len(self._steps)
        outer = self._crew.spec.outer.at_round(self._state.num_arrivals // num_workers)
        if self._plan.rule == "delayed_nesterov":
            every = self._plan.every or num_workers
            return delayed_nesterov_step(
                self._state, gradient_P, outer, every=every, c=self._plan.c
            )
        weights_P, momentum_P = outer_step(
            self._state.weights_P, self._state.momentum_P, gradient_P * num_workers**-0.5, outer
        )
        return DelayedState(
            weights_P=weights_P,
            momentum_P=momentum_P,
            buffer_P=self._state.buffer_P,
            num_arrivals=self._state.num_arrivals + 1,
        )

    def _begin_anew(self, arrived: Sequence[int]) -> None:
        """Put those who have arrived onto the newest weights, all at the same time."""
        now = max(self._done_at[index] for index in arrived)
        number = self._state.num_arrivals
        for index in arrived:
            self._crew.workers[index].rebase(self.weights(), commit=str(number), round_index=number)
            self._done_at[index] = now + self._took[index]
            self._began_at[index] = self._total_steps // len(self._steps)
