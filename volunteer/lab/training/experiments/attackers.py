"""Acceptance test 12 of ALGORITHMS.md: attackers, and an honest worker who looks like one.

Runs in: lab. Pure.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from volunteer.lab.training.attacks import Attack
from volunteer.lab.training.beginning import FIRST_REMARK
from volunteer.lab.training.experiment import Arm, Entry, Experiment, Verdict, at_most
from volunteer.lab.training.experiments.acceptance import acceptance_task
from volunteer.lab.training.results import NOTE_SEPARATOR, Outcomes
from volunteer.lab.training.strategies.diloco import DiLoCoPlan, excluded_note
from volunteer.lab.training.task import LabTask
from volunteer.run import OuterSpec

NUM_WORKERS = 8
BASE = DiLoCoPlan(
    num_workers=NUM_WORKERS,
    steps_a_round=10,
    outer=OuterSpec(lr=0.7, momentum=0.5),
    has_scorers=True,
)
HONEST, OUTLIER = "8 honest", "8 honest, one 10x slower and on another text"
ATTACKS: tuple[Attack, ...] = ("-10 D", "-20 D", "noise", "stale", "copied")
SPIKED, TRIMMED = "2 of 8: spikes, no scorers", "trimmed mean"
MAX_ROUNDS_TO_EXCLUSION = 3
REMARKS = (
    FIRST_REMARK,
    "An attacker trains as the others do and sends something else: its work times -10 or -20, noise"
    " of the same norm, the content of its first contribution again, or another's of the same"
    " round. Who is excluded, and for how long, the program's rules decide: by what blobs alone"
    " show, and by the verdicts of drawn scorers, among whom attackers say that nothing does harm.",
    "The reference has 8 honest workers: an arm with attackers also lacks their work.",
    "Spikes: the attacker's own work, but in one element of a hundred large values against the"
    " honest ones' mean. They pass every filter, and without scorers nobody is excluded for them;"
    " trimming takes away a part of what they do.",
)


def make(num_steps: int) -> Experiment:
    """Return each attack by 1 and by 2 of 8, the honest outlier, and what the trimmed mean does."""
    task = acceptance_task(num_steps)
    slow = (10,) * (NUM_WORKERS - 1) + (1,)
    outlier = replace(BASE, steps_by_worker=slow, sharding="outlier")
    arms = [
        Arm(name=HONEST, task=task, plan=BASE),
        Arm(name=OUTLIER, task=task, plan=outlier),
    ]
    for number in (1, 2):
        for attack in ATTACKS:
            attackers = tuple((NUM_WORKERS - 1 - i, attack) for i in range(number))
            plan = replace(BASE, attackers=attackers)
            arms.append(Arm(name=_arm_name(number, attack), task=task, plan=plan))
    arms += _trimmed_arms(task)
    return Experiment(
        name="acceptance-12",
        title="1 and 2 attackers of 8, and an honest worker who looks like one",
        arms=tuple(arms),
        reference=HONEST,
        judge=_judge,
        remarks=REMARKS,
    )


def _trimmed_arms(task: LabTask) -> list[Arm]:
    """Return spikes against the mean and the trimmed mean, and what trimming costs without any."""
    spiked = replace(BASE, has_scorers=False, attackers=((7, "spikes"), (6, "spikes")))
    trimmed = msgspec.structs.replace(BASE.outer, aggregation="trimmed_mean")
    return [
        Arm(name=SPIKED, task=task, plan=spiked),
        Arm(name=f"{SPIKED}, {TRIMMED}", task=task, plan=replace(spiked, outer=trimmed)),
        Arm(name=f"{HONEST}, {TRIMMED}", task=task, plan=replace(BASE, outer=trimmed)),
    ]


def _arm_name(number: int, attack: Attack) -> str:
    return f"{number} of 8: {attack}"


def _judge(outcomes: Outcomes) -> tuple[Verdict, ...]:
    verdicts = [_never_excluded(outcomes, HONEST), _never_excluded(outcomes, OUTLIER)]
    for number in (1, 2):
        for attack in ATTACKS:
            name = _arm_name(number, attack)
            verdicts.append(at_most(outcomes, name, over=HONEST, percent=1.0))
            verdicts.append(_excluded_soon(outcomes, name, number))
    verdicts += [
        at_most(outcomes, f"{arm}, {TRIMMED}", over=HONEST, percent=1.0) for arm in (SPIKED, HONEST)
    ]
    return tuple(verdicts)


def _excluded_soon(outcomes: Outcomes, arm: str, number: int) -> Verdict:
    """Judge whether exactly the attackers are excluded, each after at most three rounds."""
    attackers = {f"worker-{NUM_WORKERS - 1 - i}" for i in range(number)}
    seeds = outcomes.seeds(arm)
    seen = {seed: exclusions(outcomes, arm, seed) for seed in seeds}
    # The first contribution of `stale` is honest; it is repeated from the second commit on.
    latest = MAX_ROUNDS_TO_EXCLUSION + arm.endswith("stale")
    is_met = all(
        set(excluded) == attackers and max(excluded.values()) <= latest
        for excluded in seen.values()
    )
    return Verdict(
        claim=f"{arm}: who is excluded",
        threshold=f"the attackers alone, by commit {latest}",
        seen="; ".join(_describe(excluded) for excluded in seen.values()) or "not finished",
        is_met=is_met if seeds else None,
    )


def _never_excluded(outcomes: Outcomes, arm: str) -> Verdict:
    seeds = outcomes.seeds(arm)
    seen = [exclusions(outcomes, arm, seed) for seed in seeds]
    return Verdict(
        claim=f"{arm}: who is excluded",
        threshold="nobody",
        seen="; ".join(_describe(excluded) for excluded in seen) or "not finished",
        is_met=not any(seen) if seeds else None,
    )


def exclusions(outcomes: Outcomes, arm: str, seed: int) -> dict[str, int]:
    """Return who was excluded in a finished arm, and after how many rounds first."""
    excluded: dict[str, int] = {}
    for point in outcomes.curve(arm, seed):
        for note in point.notes.split(NOTE_SEPARATOR):
            author, round_index = excluded_note(note)
            if author:
                excluded.setdefault(author, round_index)
    return excluded


def _describe(excluded: dict[str, int]) -> str:
    each = [f"{author} by commit {number}" for author, number in sorted(excluded.items())]
    return ", ".join(each) or "nobody"


ENTRY = Entry(
    name="acceptance-12",
    title="1 and 2 attackers of 8, and an honest worker who looks like one",
    make=make,
    num_steps=100,
    minutes_a_seed=3.0,
)
