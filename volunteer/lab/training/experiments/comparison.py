"""Every strategy of the lab, four workers, the same tokens: a table to choose from.

Runs in: lab. Pure.

All share every H = 10 steps with the program's outer optimizer (0.7, 0.5) where they have one, on
the task of docs/design/ALGORITHMS.md section 13; none is tuned. The asynchronous arms have workers
of the speeds of google-deepmind/asyncdiloco's example (AsyncLocalSGDToyExample.ipynb: 0.58, 0.75,
1.51 and 3.33 s a step): what they gain, time, is not in a table at equal tokens.
"""

from __future__ import annotations

import dataclasses

import msgspec

from volunteer.lab.training.beginning import FIRST_REMARK, PRETRAINED_STEPS
from volunteer.lab.training.experiment import Arm, Entry, Experiment, Verdict, below
from volunteer.lab.training.experiments.overlap import control_fails
from volunteer.lab.training.results import Outcomes
from volunteer.lab.training.strategies.asynchronous import AsyncPlan
from volunteer.lab.training.strategies.data_parallel import DataParallelPlan
from volunteer.lab.training.strategies.diloco import FEDAVG, DiLoCoPlan
from volunteer.lab.training.strategies.eager import EagerPlan
from volunteer.lab.training.strategies.noloco import NolocoPlan
from volunteer.lab.training.strategies.overlap import DelayedPlan, OverlapPlan
from volunteer.lab.training.strategies.streaming import StreamingPlan
from volunteer.lab.training.strategy import Plan
from volunteer.lab.training.task import LabTask, small_task
from volunteer.run import CodecSpec, OuterSpec

NUM_WORKERS = 4
STEPS_A_ROUND = 10
INT4 = CodecSpec()
SPEEDS = tuple(1.0 / seconds for seconds in (0.58, 0.75, 1.51, 3.33))
EAGER = OuterSpec(lr=0.4)
"""What arXiv:2502.12996 is said to have found best for two workers, in a secondary summary [S]."""
MULOCO = OuterSpec(lr=0.7, momentum=0.6)
"""arXiv:2505.23725, as ALGORITHMS.md section 10 has it."""

ONE = "one worker, a quarter of the tokens"
DDP = "DDP 4x batch"
DILOCO = "DiLoCo"
LATE = "a round late (control)"
NAIVE = "async, naive (control)"


def make(num_steps: int) -> Experiment:
    """Return the experiment over `num_steps` inner steps."""
    task = small_task(
        num_steps=num_steps,
        evaluate_every_steps=max(1, num_steps // 8),
        pretrained_steps=PRETRAINED_STEPS,
    )
    arms = [Arm(name=name, task=task, plan=plan) for name, plan in _plans().items()]
    muloco = DiLoCoPlan(num_workers=NUM_WORKERS, steps_a_round=STEPS_A_ROUND, outer=MULOCO)
    arms.append(Arm(name="MuLoCo (inner Muon)", task=with_muon(task), plan=muloco))
    return Experiment(
        name="strategies",
        title=f"All strategies, {NUM_WORKERS} workers, H = {STEPS_A_ROUND}",
        arms=tuple(arms),
        reference=DDP,
        judge=_judge,
        remarks=(
            FIRST_REMARK,
            "Not tuned: each has the program's outer optimizer (learning rate 0.7, momentum 0.5),"
            " NoLoCo its authors' numbers, FedAvg 1.0 and 0, MuLoCo 0.7 and 0.6, eager updates once"
            " more 0.4.",
            "NoLoCo and eager updates: measured is the mean of the workers' own shared weights.",
            "Streaming: at the end the first fragment is half a round older than the second.",
            "Async: speeds 1 : 0.77 : 0.38 : 0.17; the slow take fewer steps (DyLU).",
        ),
    )


def _plans() -> dict[str, Plan]:
    k, h = NUM_WORKERS, STEPS_A_ROUND
    diloco = DiLoCoPlan(num_workers=k, steps_a_round=h)
    streaming = StreamingPlan(
        num_workers=k, steps_a_round=h, num_fragments=2, delay_steps=1, codec=INT4
    )
    return {
        DDP: DataParallelPlan(num_workers=k),
        ONE: DataParallelPlan(num_workers=1),
        DILOCO: diloco,
        "NoLoCo": NolocoPlan(num_workers=k, steps_a_round=h),
        "streaming, 2 fragments, int4": streaming,
        "eager updates": EagerPlan(num_workers=k, steps_a_round=h),
        "eager updates, lr 0.4": EagerPlan(num_workers=k, steps_a_round=h, outer=EAGER),
        "overlap 10 %": OverlapPlan(num_workers=k, steps_a_round=h, overlap_steps=h // 10),
        "async, delayed Nesterov": AsyncPlan(speeds=SPEEDS, steps_a_round=h),
        "FedAvg": dataclasses.replace(diloco, outer=FEDAVG),
        "DiLoCo, int4": dataclasses.replace(diloco, codec=INT4),
        NAIVE: AsyncPlan(speeds=SPEEDS, steps_a_round=h, rule="naive"),
        LATE: DelayedPlan(num_workers=k, steps_a_round=h),
    }


def with_muon(task: LabTask) -> LabTask:
    """Return the task with Muon as inner optimizer; its learning rate is scaled to AdamW's."""
    inner = msgspec.structs.replace(task.spec.inner, optimizer="muon")
    return dataclasses.replace(task, spec=msgspec.structs.replace(task.spec, inner=inner))


def _judge(outcomes: Outcomes) -> tuple[Verdict, ...]:
    worth_it = [
        below(outcomes, name, than=ONE)
        for name in (*_plans(), "MuLoCo (inner Muon)")
        if name not in (ONE, NAIVE, LATE)
    ]
    return (*worth_it, control_fails(outcomes, LATE, over=DILOCO))


ENTRY = Entry(
    name="strategies",
    title="every strategy with four workers at equal tokens: a table to choose from",
    make=make,
    num_steps=200,
    minutes_a_seed=2.0,
)
