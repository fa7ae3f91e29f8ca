"""Acceptance test 9: what it costs to go on training while the exchange is in flight.

Runs in: lab. Pure.

A tenth of the round must cost at most 1 %. The control, the same exchange a whole round late with
nothing kept of what was trained meanwhile, must fail with momentum 0.9: if it did not, the test
would show nothing. The arms between them say where it begins to cost.
"""

from __future__ import annotations

from volunteer.lab.training.beginning import FIRST_REMARK, PRETRAINED_STEPS
from volunteer.lab.training.experiment import Arm, Entry, Experiment, Verdict, at_most
from volunteer.lab.training.results import Outcomes
from volunteer.lab.training.strategies.diloco import DiLoCoPlan
from volunteer.lab.training.strategies.overlap import DelayedPlan, OverlapPlan
from volunteer.lab.training.task import LabTask, small_task
from volunteer.run import OuterSpec

NUM_WORKERS = 4
STEPS_A_ROUND = 10
MOMENTA = (0.5, 0.9)
PERCENTS = (10, 50, 100)
"""Of the round, during which the exchange is in flight."""
MAX_COST_PERCENT = 1.0
CONTROL_PERCENT = 10.0
"""The control fails if it is so much worse, or breaks down, for every seed."""
MIN_SEEDS = 3


def make(num_steps: int) -> Experiment:
    """Return the experiment over `num_steps` inner steps."""
    task = small_task(
        num_steps=num_steps,
        evaluate_every_steps=max(1, num_steps // 8),
        pretrained_steps=PRETRAINED_STEPS,
    )
    arms = [arm for momentum in MOMENTA for arm in _arms(task, momentum)]
    arms.sort(key=lambda arm: "50 %" in arm.name or "100 %" in arm.name)  # what is judged first
    return Experiment(
        name="acceptance-9",
        title=f"Training during the exchange, {NUM_WORKERS} workers, H = {STEPS_A_ROUND}",
        arms=tuple(arms),
        reference=_waits(MOMENTA[0]),
        judge=_judge,
        remarks=(
            FIRST_REMARK,
            "Measured are the shared weights with what is in flight applied, so that after n rounds"
            " the work of n rounds is in them, in every arm.",
            "An overlap keeps what was trained meanwhile (theta <- G + (theta - P)); the control,"
            " `a round late`, does not, and its contributions are a round old when they count.",
        ),
    )


def _waits(momentum: float) -> str:
    return f"waits, momentum {momentum:g}"


def _overlaps(percent: int, momentum: float) -> str:
    return f"overlap {percent} %, momentum {momentum:g}"


def _late(momentum: float) -> str:
    return f"a round late, momentum {momentum:g}"


def _arms(task: LabTask, momentum: float) -> list[Arm]:
    outer = OuterSpec(momentum=momentum)
    waits = DiLoCoPlan(num_workers=NUM_WORKERS, steps_a_round=STEPS_A_ROUND, outer=outer)
    late = DelayedPlan(num_workers=NUM_WORKERS, steps_a_round=STEPS_A_ROUND, outer=outer)
    arms = [
        Arm(name=_waits(momentum), task=task, plan=waits),
        Arm(name=_late(momentum), task=task, plan=late),
    ]
    for percent in PERCENTS:
        plan = OverlapPlan(
            num_workers=NUM_WORKERS,
            steps_a_round=STEPS_A_ROUND,
            overlap_steps=STEPS_A_ROUND * percent // 100,
            outer=outer,
        )
        arms.append(Arm(name=_overlaps(percent, momentum), task=task, plan=plan))
    return arms


def _judge(outcomes: Outcomes) -> tuple[Verdict, ...]:
    costs = [
        at_most(outcomes, _overlaps(10, m), over=_waits(m), percent=MAX_COST_PERCENT)
        for m in MOMENTA
    ]
    return (*costs, control_fails(outcomes, _late(0.9), over=_waits(0.9)))


def control_fails(outcomes: Outcomes, arm: str, *, over: str) -> Verdict:
    """Judge whether a control is as bad as it has to be."""
    excess = outcomes.excess_percent(arm, over)
    each = excess.values if excess else ()
    return Verdict(
        claim=f"control: {arm} against {over}",
        threshold=f"fails: above {CONTROL_PERCENT:+g} %, or breaks down, for every seed",
        seen=", ".join(f"{value:+.1f} %" for value in each) or "not finished",
        is_met=min(each) > CONTROL_PERCENT if len(each) >= MIN_SEEDS else None,
    )


ENTRY = Entry(
    name="acceptance-9",
    title="training during the exchange costs at most 1 % (and the control fails)",
    make=make,
    num_steps=200,
    minutes_a_seed=1.5,
)
