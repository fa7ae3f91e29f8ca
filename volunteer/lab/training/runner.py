"""Trains the arms of an experiment, one after the other, within a budget of processor time.

Runs in: lab.

All arms of the first seed come first, so that what there is when the budget ends can be compared.
What is finished is never trained again; an arm that was cut short begins anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from volunteer.errors import ContributionRejectedError, TrainerError
from volunteer.files import lock_folder
from volunteer.lab.training.experiment import Arm, Experiment
from volunteer.lab.training.results import (
    NOTE_SEPARATOR,
    LabError,
    Point,
    PointsFile,
    ResultsError,
)
from volunteer.lab.training.strategy import RoundReport, Strategy
from volunteer.lab.training.task import loss_of

Say = Callable[[str], None]


class BudgetSpent(LabError):
    """The budget is used up; the same command goes on where it stopped."""


@dataclass(slots=True)
class Budget:
    """Processor time that this process may use, all threads together."""

    seconds: float
    """Infinite: no limit."""
    now_s: Callable[[], float] = time.process_time
    _started_at: float = field(init=False)

    def __post_init__(self) -> None:
        """Begin to count."""
        self._started_at = self.now_s()

    @property
    def spent_s(self) -> float:
        """Since it was made."""
        return self.now_s() - self._started_at

    def verify(self) -> None:
        """Check that there is some left.

        Raises:
            BudgetSpent: there is not.
        """
        if self.spent_s >= self.seconds:
            raise BudgetSpent


def run_experiment(
    experiment: Experiment,
    *,
    seeds: Sequence[int],
    folder: Path,
    budget: Budget,
    say: Say,
    only: frozenset[str] = frozenset(),
) -> None:
    """Train what is not finished yet; rows are written as they come.

    Args:
        experiment: what.
        seeds: for each of which every arm is trained once.
        folder: of this experiment's results; made if need be.
        budget: looked at after every round.
        say: is told of every point.
        only: names of the arms to train; empty: all.

    Raises:
        LabError: no arm has a name of `only`.
        BudgetSpent: what is written so far stands.
        ResultsError: the folder holds results of other settings.
        AlreadyRunningError: another process writes there.
    """
    unknown = only - {arm.name for arm in experiment.arms}
    if unknown:
        missing = ", ".join(repr(name) for name in sorted(unknown))
        known = ", ".join(repr(arm.name) for arm in experiment.arms)  # a name may have commas
        raise LabError(f"no arm of {experiment.name}: {missing}; it has {known}")
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder):
        file = PointsFile(folder)
        _verify_settings(experiment, file)
        for arm_name, seed in file.drop_unfinished():
            say(f"{arm_name}, seed {seed}: was cut short and begins anew")
        for seed in seeds:
            for arm in experiment.arms:
                if (arm.name, seed) in file.finished or (only and arm.name not in only):
                    continue
                budget.verify()
                _run_arm(experiment.name, arm, seed, file, budget, say)


def _verify_settings(experiment: Experiment, file: PointsFile) -> None:
    due = {arm.name: arm.settings for arm in experiment.arms}
    for (name, _), settings in file.finished.items():
        if due.get(name, settings) != settings:
            raise ResultsError(
                f"the folder holds results of {name!r} with other settings (its length, say)"
            )


def _run_arm(
    experiment: str, arm: Arm, seed: int, file: PointsFile, budget: Budget, say: Say
) -> None:
    begun_s = budget.spent_s
    for point in points_of(experiment, arm, seed, budget):
        file.append(point)
        say(
            f"{arm.name}, seed {seed}: step {point.inner_step} of {arm.task.num_steps},"
            f" loss {point.loss:.4f}, {budget.spent_s - begun_s:.0f} core-s"
            + (f" ({point.notes})" if point.notes else "")
        )


def points_of(experiment: str, arm: Arm, seed: int, budget: Budget) -> Iterable[Point]:
    """Train one arm and yield its points, the first before any step, the last at its end.

    Where training breaks down, the last point says so and has an infinite loss.

    Raises:
        BudgetSpent: after any round.
    """
    task = arm.task
    spec = arm.plan.spec(task, seed)
    done = _Done()

    def point(loss: float, *, is_last: bool = False) -> Point:
        return Point(
            experiment=experiment,
            arm=arm.name,
            seed=seed,
            inner_step=done.num_steps,
            tokens=done.num_tokens,
            loss=loss,
            bytes_per_worker=done.bytes_sent,
            notes=NOTE_SEPARATOR.join(done.take_notes()),
            is_last=is_last,
            settings=arm.settings,
        )

    try:
        strategy = arm.plan.begin(task, seed)
        yield point(loss_of(spec, strategy.weights()))
        while done.num_steps < task.num_steps:
            is_due = _advance(strategy, done, task.evaluate_every_steps)
            budget.verify()
            is_last = done.num_steps >= task.num_steps
            if is_due or is_last:
                yield point(loss_of(spec, strategy.weights()), is_last=is_last)
    except (TrainerError, ContributionRejectedError) as error:
        done.notes.append(f"broke down: {error}")
        yield point(math.inf, is_last=True)


@dataclass(slots=True)
class _Done:
    """Sums over the rounds of an arm."""

    num_steps: int = 0
    num_tokens: int = 0
    bytes_sent: float = 0.0
    notes: list[str] = field(default_factory=list)

    def add(self, report: RoundReport) -> None:
        self.num_steps += report.num_steps
        self.num_tokens += report.num_tokens
        self.bytes_sent += report.bytes_sent
        self.notes += [note for note in report.notes if note not in self.notes]

    def take_notes(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes


def _advance(strategy: Strategy, done: _Done, evaluate_every_steps: int) -> bool:
    """Take one round; tell whether it passed a multiple of `evaluate_every_steps`."""
    before = done.num_steps // evaluate_every_steps
    done.add(strategy.advance())
    return done.num_steps // evaluate_every_steps > before
