"""`allmende demo`: hands over to the demo process, which starts a swarm of real agents.

Runs in: the command line. The demo has a session of its own and is told to end by us alone, so that
it is told once, and never while it does not know yet how to end in order.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tui import arguments
from tui.arguments import AsJson
from volunteer.errors import VolunteerError
from volunteer.interrupts import holding_signals

DEMO_COMMAND = (sys.executable, "-P", "-m", "volunteer.agent.demo")
INTERRUPTED_EXIT_CODE = 130
# As shells give it to what Ctrl+C ended.


def demo(
    volunteers: Annotated[int, typer.Option(min=1, max=16, help="Agents to start.")] = 3,
    minutes: Annotated[
        float, typer.Option(callback=arguments.minutes, help="How long they train; 1 or more.")
    ] = 2.0,
    run: Annotated[
        str, typer.Option(metavar="RUN", help="What they train: demo, commons or a RunSpec file.")
    ] = "demo",
    round_s: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            callback=arguments.round_length,
            help="Round length; default: the run's, or a thirtieth of the time.",
        ),
    ] = None,
    verify: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check a kept demo's records again.")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep everything in this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a whole swarm on this machine, in a folder of its own."""
    flags = ["--json"] if as_json else []
    if verify is not None:
        if keep is not None:
            raise typer.BadParameter("--verify and --keep exclude each other")
        sys.exit(verify_demo(verify, flags))
    if round_s is not None:
        flags += ["--round-s", f"{round_s:g}"]
    sys.exit(run_demo(volunteers, minutes, run, keep, flags))


def run_demo(
    volunteers: int, minutes: float, run: str, keep: Path | None, flags: Sequence[str]
) -> int:
    """Run the demo and return its exit status; its output is passed through.

    Args:
        volunteers: agents to start.
        minutes: how long they train.
        run: a built-in run or a RunSpec file.
        keep: folder to leave everything in; None: a temporary one, removed at the end.
        flags: passed on, as `--json`.

    Raises:
        VolunteerError: `keep` holds something already.
    """
    run_name = str(Path(run).absolute()) if Path(run).is_file() else run
    argv = ["--volunteers", str(volunteers), "--minutes", f"{minutes:g}", "--run", run_name]
    who = "a volunteer" if volunteers == 1 else f"{volunteers} volunteers"
    plan = f"Starting {who} on this machine, to train a small model on the CPU for {minutes:g} min"
    if keep is not None:
        _verify_empty(keep)
        _say(f"{plan}; all is kept in {keep}. Ctrl+C ends it.")
        return _run([*argv, "--dir", str(keep.absolute()), *flags])
    with tempfile.TemporaryDirectory(prefix="allmende-demo-") as folder:
        _say(f"{plan}, in a folder that is removed at the end. Ctrl+C ends it.")
        return _run([*argv, "--dir", folder, *flags])


def verify_demo(folder: Path, flags: Sequence[str]) -> int:
    """Check a kept demo again and return the exit status."""
    return _run(["--verify", str(folder.absolute()), *flags])


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _verify_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise VolunteerError(f"{folder} holds something already", hint="name a new folder")


def _run(argv: Sequence[str]) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)  # also then, nothing may be left running
    process: subprocess.Popen[bytes] | None = None
    try:
        with holding_signals(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process = subprocess.Popen([*DEMO_COMMAND, *argv], cwd="/", start_new_session=True)
        return process.wait()
    except KeyboardInterrupt:
        if process is None:  # it could not be started
            raise
        process.terminate()
    _wait_uninterrupted(process)
    if process.returncode == -signal.SIGTERM:  # it had not begun, and so has not said it
        _say("stopped; nothing is left running")
    return INTERRUPTED_EXIT_CODE


def _wait_uninterrupted(process: subprocess.Popen[bytes]) -> None:
    while process.returncode is None:
        try:
            process.wait()
        except KeyboardInterrupt:
            continue  # it is ending: agents first
