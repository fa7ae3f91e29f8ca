"""`allmende demo`: hands over to the demo process, which starts a swarm of real agents.

Runs in: the command line.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from volunteer.errors import VolunteerError

DEMO_COMMAND = (sys.executable, "-m", "volunteer.agent.demo")


def run_demo(volunteers: int, minutes: float, keep: Path | None, flags: Sequence[str]) -> int:
    """Run the demo and return its exit status; its output is passed through.

    Args:
        volunteers: agents to start.
        minutes: how long they train.
        keep: folder to leave everything in; None: a temporary one, removed at the end.
        flags: passed on, as `--json`.

    Raises:
        VolunteerError: `keep` holds something already.
    """
    argv = ["--volunteers", str(volunteers), "--minutes", f"{minutes:g}"]
    if keep is not None:
        _verify_empty(keep)
        return _run([*argv, "--dir", str(keep), *flags])
    with tempfile.TemporaryDirectory(prefix="allmende-demo-") as folder:
        return _run([*argv, "--dir", folder, *flags])


def verify_demo(folder: Path, flags: Sequence[str]) -> int:
    """Check a kept demo again and return the exit status."""
    return _run(["--verify", str(folder), *flags])


def _verify_empty(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise VolunteerError(f"{folder} holds something already", hint="name a new folder")


def _run(argv: Sequence[str]) -> int:
    with subprocess.Popen([*DEMO_COMMAND, *argv]) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # The terminal interrupted the demo as well: it ends its agents, then itself.
                continue
