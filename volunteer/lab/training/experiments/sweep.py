"""Which outer optimizer, for which length of the round: how the settings of opendiloco.py came.

Runs in: lab. Pure.

One seed picks, other seeds confirm (`allmende lab run outer --seeds 1`). What the scaling laws of
DiLoCo (arXiv:2503.09799) suggest for 8 workers is an outer learning rate of 0.8 at momentum 0.9 and
H = 30, for runs of thousands of rounds. Short runs ask for less momentum, and for none at first.
"""

from __future__ import annotations

from volunteer.lab.training.experiment import Arm, Entry, Experiment, Verdict
from volunteer.lab.training.results import Outcomes
from volunteer.lab.training.strategies.data_parallel import DataParallelPlan
from volunteer.lab.training.strategies.diloco import DiLoCoPlan
from volunteer.lab.training.task import LabTask, small_task
from volunteer.run import OuterSpec

NUM_WORKERS = 8
ALONE, REFERENCE = "one worker", "DDP 8x batch"
GRID = (
    (10, 1.0, 0.7, 200),
    (20, 0.8, 0.6, 200),
    (10, 1.0, 0.5, 200),
    (20, 1.0, 0.7, 200),
    (10, 1.0, 0.0, 0),
    (20, 1.0, 0.0, 0),
    (5, 0.8, 0.5, 0),
    (20, 0.8, 0.5, 0),
    (20, 0.8, 0.8, 0),
)
"""H, outer learning rate, momentum, and steps before which there is none; the best first."""


def make(num_steps: int) -> Experiment:
    """Return the sweep over `num_steps` inner steps."""
    task = small_task(num_steps=num_steps, evaluate_every_steps=max(1, num_steps // 6))
    arms = [
        Arm(name=ALONE, task=task, plan=DataParallelPlan(num_workers=1)),
        Arm(name=REFERENCE, task=task, plan=DataParallelPlan(num_workers=NUM_WORKERS)),
        *(_arm(task, *settings) for settings in GRID),
    ]
    return Experiment(
        name="outer",
        title=f"DiLoCo with {NUM_WORKERS} workers: outer learning rate, momentum and H",
        arms=tuple(arms),
        reference=REFERENCE,
        judge=_judge,
    )


def _arm(task: LabTask, steps_a_round: int, lr: float, momentum: float, plain_steps: int) -> Arm:
    since = f" after {plain_steps} steps" if plain_steps else ""
    outer = OuterSpec(lr=lr, momentum=momentum, momentum_warmup_rounds=plain_steps // steps_a_round)
    return Arm(
        name=f"H={steps_a_round}, lr {lr:g}, momentum {momentum:g}{since}",
        task=task,
        plan=DiLoCoPlan(num_workers=NUM_WORKERS, steps_a_round=steps_a_round, outer=outer),
    )


def _judge(outcomes: Outcomes) -> tuple[Verdict, ...]:
    """Claim nothing: what is best is seen in the table."""
    return ()


ENTRY = Entry(
    name="outer",
    title="DiLoCo with 8 workers: outer learning rate, momentum and H (a sweep)",
    make=make,
    num_steps=600,
    minutes_a_seed=9.0,
)
