"""Which outer optimizer, and how long a round: the settings that opendiloco.py uses, and others.

Runs in: lab. Pure.

One seed picks, other seeds confirm (`lab run outer --seeds 1`). What the scaling laws of DiLoCo
(arXiv:2503.09799) suggest for 8 workers is an outer learning rate of 0.8 at momentum 0.9 and
H = 30, for runs of thousands of rounds; few rounds ask for less momentum (ALGORITHMS.md, 13).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from volunteer.lab.training.experiment import Arm, Entry, Experiment, Verdict
from volunteer.lab.training.results import Outcomes
from volunteer.lab.training.strategies.data_parallel import DataParallelPlan
from volunteer.lab.training.strategies.diloco import DiLoCoPlan
from volunteer.lab.training.task import LabTask, small_task
from volunteer.run import OuterSpec, RunSpec

NUM_WORKERS = 8
ALONE, REFERENCE = "one worker", "DDP 8x batch"
GRID = (
    (20, 0.8, 0.5),
    (20, 1.0, 0.0),
    (5, 0.8, 0.5),
    (10, 1.0, 0.0),
    (10, 0.8, 0.5),
    (20, 0.8, 0.8),
)
"""H, outer learning rate, momentum; what matters most first."""
LOW_LR = 1e-3
"""Of the inner optimizer, half of the task's: with it, DDP and the first two of these again."""
LOW_GRID = ((10, 0.8, 0.5), (20, 0.8, 0.5))


def make(num_steps: int) -> Experiment:
    """Return the sweep over `num_steps` inner steps."""
    task = small_task(num_steps=num_steps, evaluate_every_steps=max(1, num_steps // 10))
    low = replace(task, spec=_with_lr(task.spec, LOW_LR))
    alone, ddp = (DataParallelPlan(num_workers=number) for number in (1, NUM_WORKERS))
    arms = [Arm(name=REFERENCE, task=task, plan=ddp)]
    arms += [_arm(task, *settings) for settings in GRID[:2]]
    arms += [Arm(name=ALONE, task=task, plan=alone)]
    arms += [_arm(task, *settings) for settings in GRID[2:]]
    inner = f", inner lr {LOW_LR:g}"
    arms += [Arm(name=REFERENCE + inner, task=low, plan=ddp)]
    arms += [_arm(low, *settings, suffix=inner) for settings in LOW_GRID]
    return Experiment(
        name="outer",
        title=f"DiLoCo with {NUM_WORKERS} workers: outer learning rate, momentum and H",
        arms=tuple(arms),
        reference=REFERENCE,
        judge=_judge,
    )


def _with_lr(spec: RunSpec, lr: float) -> RunSpec:
    return msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, lr=lr))


def _arm(task: LabTask, steps_a_round: int, lr: float, momentum: float, suffix: str = "") -> Arm:
    return Arm(
        name=f"H={steps_a_round}, lr {lr:g}, momentum {momentum:g}{suffix}",
        task=task,
        plan=DiLoCoPlan(
            num_workers=NUM_WORKERS,
            steps_a_round=steps_a_round,
            outer=OuterSpec(lr=lr, momentum=momentum),
        ),
    )


def _judge(outcomes: Outcomes) -> tuple[Verdict, ...]:
    """Claim nothing: what is best is seen in the table."""
    return ()


ENTRY = Entry(
    name="outer",
    title="DiLoCo with 8 workers: outer learning rate, momentum and H (a sweep)",
    make=make,
    num_steps=600,
    minutes_a_seed=8.0,
)
