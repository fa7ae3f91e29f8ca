"""An experiment's results as Markdown: the arms, the papers' figures, the verdicts, the machine.

Runs in: lab. Pure, but for `write_table`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from volunteer.files import replace_file
from volunteer.lab.training.about import LabRun, read_runs
from volunteer.lab.training.experiment import Arm, Experiment, Verdict
from volunteer.lab.training.results import Outcomes, PointsFile, Spread

TABLE_NAME = "README.md"
_MISSING = "-"
_MET = {True: "met", False: "**missed**", None: "not known yet"}


def write_table(experiment: Experiment, folder: Path) -> str:
    """Write the table of what is finished into the folder, and return it."""
    text = format_table(experiment, Outcomes(PointsFile(folder).points), list(read_runs(folder)))
    replace_file(folder / TABLE_NAME, [text.encode()], mode=0o644)
    return text


def format_table(experiment: Experiment, outcomes: Outcomes, runs: Sequence[LabRun]) -> str:
    """Return the whole text.

    Args:
        experiment: what was to be done.
        outcomes: what is finished.
        runs: calls of the lab that led there, the oldest first.
    """
    head = ["Arm", "Seeds", "Tokens", "Loss", "Perplexity", f"Against {experiment.reference}"]
    head += ["Sent by a worker", *experiment.papers]
    rows = [_row(arm, experiment, outcomes) for arm in experiment.arms]
    lines = [f"# {experiment.name}: {experiment.title}", "", *_markdown(head, rows), ""]
    lines += [
        "Loss: held-out, nats per byte, mean and standard deviation over the seeds, at the end."
        f" Against {experiment.reference}: of the loss, each seed with itself, mean and range.",
        "",
    ]
    verdicts = experiment.judge(outcomes)
    if verdicts:
        lines += ["## What was claimed", "", *format_verdicts(verdicts), ""]
    for remark in experiment.remarks:
        lines += [remark, ""]
    lines += _provenance(experiment, outcomes, runs)
    return "\n".join(lines).rstrip() + "\n"


def format_verdicts(verdicts: Iterable[Verdict]) -> list[str]:
    """Return the claims as a table."""
    rows = [[v.claim, v.threshold, v.seen, _MET[v.is_met]] for v in verdicts]
    return _markdown(["Claim", "Threshold", "Seen (each seed)", "Verdict"], rows)


def _row(arm: Arm, experiment: Experiment, outcomes: Outcomes) -> list[str]:
    papers = [*arm.papers, *[""] * (len(experiment.papers) - len(arm.papers))]
    cells = [figure or _MISSING for figure in papers]
    loss = outcomes.loss(arm.name)
    if loss is None:
        return [arm.name, "0", *[_MISSING] * 5, *cells]
    seeds = outcomes.seeds(arm.name)
    last = outcomes.last(arm.name, seeds[0])
    perplexity = Spread(tuple(math.exp(value) for value in loss.values))
    return [
        arm.name,
        str(len(seeds)),
        f"{last.tokens / 1e6:.2f} M",
        _with_deviation(loss, 4),
        _with_deviation(perplexity, 3),
        _excess(arm.name, experiment.reference, outcomes),
        describe_bytes(last.bytes_per_worker),
        *cells,
    ]


def _with_deviation(spread: Spread, digits: int) -> str:
    if not all(math.isfinite(value) for value in spread.values):
        return "broke down"
    mean = f"{spread.mean:.{digits}f}"
    return mean if spread.deviation is None else f"{mean} ± {spread.deviation:.{digits}f}"


def _excess(arm: str, reference: str, outcomes: Outcomes) -> str:
    excess = outcomes.excess_percent(arm, reference)
    if arm == reference or excess is None or not math.isfinite(excess.mean):
        return _MISSING
    return f"{excess.mean:+.2f} % ({min(excess.values):+.2f} to {max(excess.values):+.2f})"


def describe_bytes(num_bytes: float) -> str:
    """Return an amount of data with a unit of a thousand."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def _provenance(experiment: Experiment, outcomes: Outcomes, runs: Sequence[LabRun]) -> list[str]:
    task = experiment.arms[0].task
    spec = task.spec
    seeds = sorted({seed for arm in experiment.arms for seed in outcomes.seeds(arm.name)})
    lines = [
        "## How it was done",
        "",
        f"- Task: {spec.model.num_layers} layers of width {spec.model.dim},"
        f" {spec.inner.batch_sequences} sequences of {spec.model.context_tokens} bytes a worker"
        f" and step, {task.num_steps} steps, AdamW at {spec.inner.lr:g},"
        f" {spec.evaluation.num_sequences} held-out windows of {', '.join(spec.data.sources)}.",
        f"- Seeds: {', '.join(map(str, seeds)) or 'none finished'}.",
    ]
    commands = dict.fromkeys(run.command for run in runs)
    lines += [f"- Command: `{command}`" for command in commands]
    places = dict.fromkeys(f"{run.machine}; {run.software}" for run in runs)
    lines += [f"- Machine: {place}." for place in places]
    if runs:
        minutes = sum(run.cpu_s for run in runs) / 60
        lines.append(
            f"- Done between {runs[0].started_utc} and {runs[-1].ended_utc} UTC in"
            f" {minutes:.1f} core-minutes, by {runs[-1].program}."
        )
    return lines


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
