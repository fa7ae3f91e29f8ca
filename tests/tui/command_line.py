"""Runs `allmende` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAKE_START = """
import sys
from tui import launch
launch.AGENT_COMMAND = (sys.executable, "-m", "tests.fakes.fake_agent")
from tui.cli import main
main()
"""


def run(
    home: Path,
    *args: str,
    code: str | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    umask: int = -1,
) -> subprocess.CompletedProcess[str]:
    how = ["-m", "tui.cli"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *how, *args],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ALLMENDE_HOME": str(home), **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=cwd,
        umask=umask,
        timeout=60,
        check=False,
    )
