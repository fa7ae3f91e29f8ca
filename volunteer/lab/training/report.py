"""What the lab says of its experiments and of a folder of results.

Runs in: lab.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from volunteer.lab.training.catalogue import find
from volunteer.lab.training.experiment import Entry, Experiment
from volunteer.lab.training.plots import PlotsMissingError, plot_experiment
from volunteer.lab.training.results import Outcomes, PointsFile, ResultsError
from volunteer.lab.training.tables import write_table

PLOT_NAME = "curves.png"
_LINE_WIDTH = 100
_INDENT = "    "


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """An experiment that can be run."""

    name: str
    title: str
    num_steps: int
    """Its length by default, nominal inner steps."""
    minutes_a_seed: float
    """Core-minutes for one seed at that length; as seen on one core of an x86-64 server."""
    arms: tuple[str, ...]
    """Names for `lab run --arm`, in the order in which they are trained."""

    @classmethod
    def of(cls, entry: Entry) -> Listed:
        """Return what is said of an entry of the catalogue."""
        return cls(
            name=entry.name,
            title=entry.title,
            num_steps=entry.num_steps,
            minutes_a_seed=entry.minutes_a_seed,
            arms=tuple(arm.name for arm in entry.make(entry.num_steps).arms),
        )


class ArmReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one arm came to."""

    name: str
    seeds: tuple[int, ...]
    """For which it is finished."""
    losses: tuple[float | None, ...]
    """Final held-out loss, nats per byte, for each seed; null where training broke down."""
    tokens: int
    """Trained by all workers together, for each seed."""
    bytes_per_worker: float
    """Sent by each worker, for each seed."""


class VerdictReport(msgspec.Struct, frozen=True, kw_only=True):
    """One claim, and what was seen."""

    claim: str
    threshold: str
    seen: str
    is_met: bool | None


class LabReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder of results says."""

    experiment: str
    title: str
    folder: str
    arms: tuple[ArmReport, ...]
    verdicts: tuple[VerdictReport, ...]


def format_list(listed: Sequence[Listed]) -> str:
    """Return the experiments as lines of text, each with its arms below."""
    lines = []
    for one in listed:
        lines.append(
            f"{one.name}: {one.title}; {one.num_steps} steps,"
            f" about {one.minutes_a_seed:g} core-minutes a seed"
        )
        lines += _wrap_names(one.arms)
    return "\n".join(lines)


def _wrap_names(names: Sequence[str]) -> list[str]:
    """Return names in quotes, since they may have commas, on lines that break between them."""
    lines = [_INDENT]
    for name in names:
        quoted = f"'{name}'"
        if len(lines[-1]) + len(quoted) > _LINE_WIDTH:
            lines.append(_INDENT)
        lines[-1] += quoted + ", "
    return [line.rstrip() for line in lines[:-1]] + [lines[-1].rstrip(", ")]


def experiment_in(folder: Path) -> Experiment:
    """Return the experiment whose results are in `folder`, of the length that they have.

    Raises:
        ResultsError: nothing is finished there.
        LabError: this version does not know the experiment.
    """
    last = [point for point in PointsFile(folder).points if point.is_last]
    if not last:
        raise ResultsError(f"{folder}: no arm of an experiment is finished there", hint="")
    return find(last[0].experiment).make(max(point.inner_step for point in last))


def summarise(experiment: Experiment, folder: Path) -> LabReport:
    """Return the results in `folder`."""
    outcomes = Outcomes(PointsFile(folder).points)
    return LabReport(
        experiment=experiment.name,
        title=experiment.title,
        folder=str(folder),
        arms=tuple(_arm_report(arm.name, outcomes) for arm in experiment.arms),
        verdicts=tuple(
            VerdictReport(claim=v.claim, threshold=v.threshold, seen=v.seen, is_met=v.is_met)
            for v in experiment.judge(outcomes)
        ),
    )


def _arm_report(arm: str, outcomes: Outcomes) -> ArmReport:
    seeds = outcomes.seeds(arm)
    points = [outcomes.last(arm, seed) for seed in seeds]
    return ArmReport(
        name=arm,
        seeds=seeds,
        losses=tuple(point.loss if math.isfinite(point.loss) else None for point in points),
        tokens=points[0].tokens if points else 0,
        bytes_per_worker=points[0].bytes_per_worker if points else 0.0,
    )


def write_all(experiment: Experiment, folder: Path, *, say: Callable[[str], None]) -> str:
    """Write table and plot into the folder; return the table.

    Args:
        experiment: whose results are there.
        folder: of the results.
        say: is told where no plot could be made.
    """
    text = write_table(experiment, folder)
    try:
        plot_experiment(folder / PLOT_NAME, experiment, PointsFile(folder).points)
    except PlotsMissingError as error:
        say(f"no plot: {error} {error.hint}")
    return text
