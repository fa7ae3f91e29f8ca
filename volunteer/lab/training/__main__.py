"""`python -m volunteer.lab.training`: the lab's process, for `allmende lab`.

Runs in: lab, a process of its own, since it loads torch. Progress goes to stderr, results to
stdout. Ctrl+C and SIGTERM end it after what is written; the same command goes on later.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from volunteer.errors import VolunteerError
from volunteer.lab.training import about, report
from volunteer.lab.training.catalogue import ENTRIES, find
from volunteer.lab.training.experiment import Experiment
from volunteer.lab.training.results import LabError
from volunteer.lab.training.runner import Budget, BudgetSpent, run_experiment
from volunteer.training.child_process import end_with_parent, lower_priority

INTERRUPTED_EXIT_CODE = 130
_NICENESS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command and return the exit status."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _obey(options, about.describe_command(argv))
    except VolunteerError as error:
        _say(f"allmende: {error}" + (f"\n  hint: {error.hint}" if error.hint else ""))
        return error.exit_code
    except OSError as error:
        _say(f"allmende: {error}\n  hint: what is written stands; the same command goes on")
        return 1
    except KeyboardInterrupt:
        _say("interrupted; what is written stands, and the same command goes on from there")
        return INTERRUPTED_EXIT_CODE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="allmende lab", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    listing = verbs.add_parser("list")
    run = verbs.add_parser("run")
    run.add_argument("experiment")
    run.add_argument("--minutes", type=float, default=math.inf)
    run.add_argument("--seeds", type=int, default=3)
    run.add_argument("--first-seed", type=int, default=0)
    run.add_argument("--steps", type=int)
    run.add_argument("--arm", action="append", default=[])
    run.add_argument("--threads", type=int, default=1)
    run.add_argument("--out", type=Path, required=True)
    table = verbs.add_parser("table")
    table.add_argument("folder", type=Path)
    for verb in (listing, run, table):
        verb.add_argument("--json", action="store_true")
    return parser


def _obey(options: argparse.Namespace, command: str) -> int:
    if options.verb == "list":
        listed = [report.Listed.of(entry) for entry in ENTRIES]
        _write(_json(listed) if options.json else report.format_list(listed))
        return 0
    if options.verb == "table":
        experiment = report.experiment_in(options.folder)
        return _show(experiment, options.folder, as_json=options.json)
    return _run(options, command)


def _run(options: argparse.Namespace, command: str) -> int:
    """Train what is not finished, then show all that is."""
    entry = find(options.experiment)
    experiment = entry.make(options.steps or entry.num_steps)
    torch.set_num_threads(options.threads)
    lower_priority(_NICENESS)
    budget = Budget(options.minutes * 60)
    started_utc, end, status = about.now_utc(), "interrupted", 0
    try:
        run_experiment(
            experiment,
            seeds=range(options.first_seed, options.first_seed + options.seeds),
            folder=options.out,
            budget=budget,
            say=_say,
            only=frozenset(options.arm),
        )
        end = "finished"
    except BudgetSpent as error:
        end, status = "budget spent", error.exit_code
        _say(f"{error} ({options.minutes:g} core-minutes)")
    except LabError as error:
        end = str(error)
        raise
    finally:
        if options.out.is_dir():
            about.note_run(
                options.out,
                command=command,
                started_utc=started_utc,
                cpu_s=budget.spent_s,
                threads=options.threads,
                end=end,
            )
    _show(experiment, options.out, as_json=options.json)
    return status


def _show(experiment: Experiment, folder: Path, *, as_json: bool) -> int:
    text = report.write_all(experiment, folder, say=_say)
    _write(_json(report.summarise(experiment, folder)) if as_json else text.rstrip())
    return 0


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _end_with_command() -> None:
    """End when `allmende lab` dies, as by a closed terminal: its session here is of its own."""
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        end_with_parent(_interrupt)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt() -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    _end_with_command()
    sys.exit(main())
