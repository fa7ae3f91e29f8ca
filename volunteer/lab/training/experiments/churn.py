"""Acceptance test 10: contributions that are not listed, and workers that come and leave.

Runs in: lab. Pure.

With 30 % of the contributions dropped, and carried into the next, the loss is at most 3 % above
that of none. A swarm that grows from one worker to four and one that shrinks from four to one, of
the same compute, end within 1 % of each other (arXiv:2311.08105: only the total compute matters).
"""

from __future__ import annotations

import dataclasses

from volunteer.lab.training.beginning import FIRST_REMARK, PRETRAINED_STEPS
from volunteer.lab.training.experiment import (
    Arm,
    Entry,
    Experiment,
    Verdict,
    at_most,
    describe_excess,
)
from volunteer.lab.training.results import Outcomes
from volunteer.lab.training.strategies.diloco import DiLoCoPlan
from volunteer.lab.training.task import small_task

NUM_WORKERS = 4
STEPS_A_ROUND = 10
DROP_FRACTION = 0.3
ALL = "all listed"
DROPPED = "30 % dropped"
GROWS = "grows, 1 to 4"
SHRINKS = "shrinks, 4 to 1"
MIN_SEEDS = 3


def make(num_steps: int) -> Experiment:
    """Return the experiment over `num_steps` inner steps."""
    task = small_task(
        num_steps=num_steps,
        evaluate_every_steps=max(1, num_steps // 8),
        pretrained_steps=PRETRAINED_STEPS,
    )
    plan = DiLoCoPlan(num_workers=NUM_WORKERS, steps_a_round=STEPS_A_ROUND)
    plans = {
        ALL: plan,
        DROPPED: dataclasses.replace(plan, drop_fraction=DROP_FRACTION),
        GROWS: dataclasses.replace(plan, workers_by_phase=(1, 2, 3, 4)),
        SHRINKS: dataclasses.replace(plan, workers_by_phase=(4, 3, 2, 1)),
    }
    return Experiment(
        name="acceptance-10",
        title=f"Churn, {NUM_WORKERS} workers, H = {STEPS_A_ROUND}",
        arms=tuple(Arm(name=name, task=task, plan=plan) for name, plan in plans.items()),
        reference=ALL,
        judge=_judge,
        remarks=(
            FIRST_REMARK,
            "What is dropped is carried: its work goes back into the worker's weights, and out"
            " again with its next contribution.",
            "Growing and shrinking train 5/8 of the tokens of the other two. Whoever comes is new:"
            " no moments, the learning rate warmed up again.",
        ),
    )


def _judge(outcomes: Outcomes) -> tuple[Verdict, ...]:
    return (at_most(outcomes, DROPPED, over=ALL, percent=3.0), _is_like(outcomes, 1.0))


def _is_like(outcomes: Outcomes, percent: float) -> Verdict:
    excess = outcomes.excess_percent(GROWS, SHRINKS)
    is_known = excess is not None and len(excess.values) >= MIN_SEEDS
    return Verdict(
        claim=f"{GROWS}, against {SHRINKS}",
        threshold=f"at most {percent:g} % apart",
        seen=describe_excess(excess),
        is_met=abs(excess.mean) <= percent if excess is not None and is_known else None,
    )


ENTRY = Entry(
    name="acceptance-10",
    title="30 % dropped contributions cost at most 3 %; growing is like shrinking within 1 %",
    make=make,
    num_steps=200,
    minutes_a_seed=0.6,
)
