"""Verbs of `allmende lab` that train on this machine, and `allmende lab presets`.

Runs in: the command line. What trains is a process of its own (volunteer/lab/training), whose
output is passed through; Ctrl+C ends it first.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tui.arguments import AsJson
from volunteer.interrupts import holding_signals

LAB_COMMAND = (sys.executable, "-P", "-m", "volunteer.lab.training")
RESULTS_DIR = Path("lab-results")
MAX_MINUTES, MAX_SEEDS, MAX_SEED, MAX_STEPS, MAX_THREADS = 100_000.0, 1000, 2**31, 10**7, 1024
EXIT_STATUS = (
    "Exit status: 0 all is finished, 1 it failed or the budget was spent first, 2 bad usage,"
    " 130 interrupted."
)
INTERRUPTED_EXIT_CODE = 130


class Paper(StrEnum):
    """What can be reproduced."""

    OPENDILOCO = "opendiloco"


Minutes = Annotated[
    float | None,
    typer.Option(
        metavar="N",
        min=0.1,
        max=MAX_MINUTES,
        help="Core-minutes that this call may use; without it, as many as it takes.",
    ),
]
Seeds = Annotated[
    int,
    typer.Option(
        metavar="K", min=1, max=MAX_SEEDS, help="How many; the first is 0, or --first-seed."
    ),
]
FirstSeed = Annotated[int, typer.Option(metavar="S", min=0, max=MAX_SEED, help="The first one.")]
Steps = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, max=MAX_STEPS, help="Inner steps of a worker; default: `lab list`."
    ),
]
Arms = Annotated[
    list[str] | None,
    typer.Option("--arm", metavar="NAME", help="Only this arm, as tables name it; repeatable."),
]
Threads = Annotated[int, typer.Option(metavar="N", min=1, max=MAX_THREADS, help="Of the CPU.")]
Out = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder of the results; default: lab-results/EXPERIMENT."),
]


def list_experiments(as_json: AsJson = False) -> None:
    """List the experiments that train, and how long they take."""
    _pass_through(["list", *_json_flag(as_json)])


def run(
    experiment: Annotated[str, typer.Argument(help="A name that `allmende lab list` shows.")],
    minutes: Minutes = None,
    seeds: Seeds = 3,
    first_seed: FirstSeed = 0,
    steps: Steps = None,
    arm: Arms = None,
    threads: Threads = 1,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Train the arms of an experiment, many workers in one process, and compare them.

    Each arm (a way to share what is learned) is trained once for each seed, on the CPU, with the
    program's own training and aggregation. The folder gets points.csv (the held-out loss as it
    goes), README.md (tables), curves.png and runs.jsonl (machine, time). What is finished is not
    trained again, so that the same command goes on after Ctrl+C or at the end of its budget.
    """
    folder = (out or RESULTS_DIR / experiment).absolute()
    argv = ["run", experiment, "--seeds", str(seeds), "--first-seed", str(first_seed)]
    argv += [] if minutes is None else ["--minutes", f"{minutes:g}"]
    argv += [] if steps is None else ["--steps", str(steps)]
    for name in arm or []:
        argv += ["--arm", name]
    argv += ["--threads", str(threads), "--out", str(folder), *_json_flag(as_json)]
    _pass_through(argv)


def reproduce(
    paper: Annotated[Paper, typer.Argument(help="Whose comparison.")],
    minutes: Minutes = None,
    seeds: Seeds = 3,
    steps: Steps = None,
    threads: Threads = 1,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Do the comparison of a paper at a scale that a CPU can carry, its figures beside ours.

    opendiloco: one worker; data-parallel training with 8 times the batch; DiLoCo with 8 workers at
    two lengths of the round, and in int4; with 4 workers, on equal and on unlike data
    (arXiv:2407.07852, arXiv:2311.08105). As `lab run opendiloco`.
    """
    run(paper.value, minutes, seeds, 0, steps, None, threads, out, as_json)


def table(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of an experiment.")],
    as_json: AsJson = False,
) -> None:
    """Show what a folder of results says, and write its table and plot anew."""
    _pass_through(["table", str(folder.absolute()), *_json_flag(as_json)])


def presets(as_json: AsJson = False) -> None:
    """Show shapes of models, from a million parameters up, and what a volunteer needs for each."""
    from volunteer.presets import preset_table

    costs = preset_table()
    if as_json:
        sys.stdout.write(msgspec.json.encode(costs).decode() + "\n")
        return
    head = ("name", "parameters", "state", "contribution", "trainer at least")
    rows = [
        (
            cost.name,
            f"{cost.num_parameters / 1e6:,.1f} M",
            _size(cost.state_bytes),
            _size(cost.blob_bytes),
            _size(cost.trainer_bytes),
        )
        for cost in costs
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        sys.stdout.write("  ".join(cells) + "\n")
    sys.stdout.write(
        "state: weights and outer momentum, which a newcomer fetches once. contribution: in int4,"
        " sent once a\nround. trainer at least: six vectors in fp32 and the activations of one"
        " sequence; libraries beside.\n"
    )


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"


def _json_flag(as_json: bool) -> list[str]:
    return ["--json"] if as_json else []


def _pass_through(argv: Sequence[str]) -> None:
    """Run the lab's process; leave with its exit status, if that is not 0.

    It gets no Ctrl+C from the terminal but through us, so that we end after it.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_interrupted = False
    with holding_signals(signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([*LAB_COMMAND, *argv], cwd="/", start_new_session=True)
    while process.returncode is None:
        try:
            process.wait()
        except KeyboardInterrupt:
            if not is_interrupted:
                process.terminate()
            is_interrupted = True
    if process.returncode != 0:
        # A signal that came before it could say anything.
        raise typer.Exit(INTERRUPTED_EXIT_CODE if process.returncode < 0 else process.returncode)
