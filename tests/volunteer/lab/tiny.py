"""A task that is trained in a blink: a few thousand parameters, few windows, few steps."""

from __future__ import annotations

import math

from volunteer.lab.training.experiment import Arm
from volunteer.lab.training.results import Point
from volunteer.lab.training.runner import Budget, points_of
from volunteer.lab.training.strategy import Plan, Strategy
from volunteer.lab.training.task import LabTask, make_task


def tiny_task(num_steps: int = 8, *, evaluate_every_steps: int = 4) -> LabTask:
    return make_task(
        num_layers=1,
        dim=8,
        num_heads=2,
        ffn_dim=16,
        context_tokens=8,
        batch_sequences=2,
        lr=1e-2,
        warmup_steps=2,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        held_out_sequences=16,
        sources=("builtin:milton", "builtin:folio"),
    )


def two_layer_task(num_steps: int) -> LabTask:
    return make_task(
        dim=16,
        num_heads=2,
        ffn_dim=16,
        context_tokens=8,
        batch_sequences=2,
        num_steps=num_steps,
        held_out_sequences=16,
    )


def arm_of(plan: Plan, task: LabTask | None = None, *, name: str = "arm") -> Arm:
    return Arm(name=name, task=task or tiny_task(), plan=plan)


def points(plan: Plan, task: LabTask | None = None, *, seed: int = 0) -> list[Point]:
    return list(points_of("tiny", arm_of(plan, task), seed, Budget(math.inf)))


def trained(plan: Plan, task: LabTask, *, seed: int = 0) -> Strategy:
    strategy = plan.begin(task, seed)
    num_steps = 0
    while num_steps < task.num_steps:
        num_steps += strategy.advance().num_steps
    return strategy
