"""Find, list and stop the agents that run from an installed program: python stop_agents.py VENV.

For install.sh, which may not take the program from under them. It looks at this user's processes,
so that agents with other folders (ALLMENDE_HOME) are found too, and needs only the standard
library: it must also work when the installed program is broken. Stopping is SIGTERM, upon which an
agent saves its work.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODULES = ("volunteer.agent", "volunteer.agent.demo")
LOOK_EVERY_S = 0.1


@dataclass(frozen=True)
class Agent:
    """One process of the installed program."""

    pid: int
    flags: str
    home: str
    """Its ALLMENDE_HOME; empty where it has none or the system does not tell."""

    def __str__(self) -> str:
        folder = f"folder {self.home}" if self.home else "the usual folder"
        flags = f", flags: {self.flags}" if self.flags else ""
        return f"process {self.pid}, {folder}{flags}"


def find_agents(venv: Path) -> list[Agent]:
    """Return this user's agents (and demos) that run with the Python of `venv`."""
    bin_dir = os.path.realpath(venv / "bin")
    return [
        Agent(pid, shlex.join(flags), home_of(pid))
        for pid, words in command_lines()
        if (flags := agent_flags(words, bin_dir)) is not None
    ]


def command_lines() -> Iterator[tuple[int, list[str]]]:
    """Yield (process id, words) of each process of this user; zombies have no words."""
    if not Path("/proc/self/cmdline").exists():
        yield from command_lines_of_ps()
        return
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.stat().st_uid == os.getuid():
                words = (folder / "cmdline").read_bytes().decode(errors="surrogateescape")
                yield int(folder.name), words.split("\0")[:-1]
        except OSError:
            continue  # it has ended


def command_lines_of_ps() -> Iterator[tuple[int, list[str]]]:
    """Do the same where there is no /proc; a path with blanks in it is not found."""
    command = ["ps", "-axww", "-o", "pid=,uid=,command="]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for line in listing.splitlines():
        pid, uid, *words = line.split()
        if int(uid) == os.getuid():
            yield int(pid), words


def agent_flags(words: list[str], bin_dir: str) -> list[str] | None:
    """Return the flags of an agent's command line; None if it is not one of `bin_dir`."""
    if not words or os.path.realpath(os.path.dirname(words[0]) or "/") != bin_dir:
        return None
    for index, word in enumerate(words[:-1]):
        if word == "-m" and words[index + 1] in MODULES:
            return words[index + 2 :]
    return None


def home_of(pid: int) -> str:
    """Return the ALLMENDE_HOME of a process, if the system tells."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
        values = [v.partition("=")[2] for v in variables.split("\0") if v[:14] == "ALLMENDE_HOME="]
        return os.path.join(os.readlink(f"/proc/{pid}/cwd"), values[0]) if any(values) else ""
    except OSError:
        return ""


def stop_agents(venv: Path, deadline_s: float) -> list[Agent]:
    """Stop all, and return those that have not ended within `deadline_s`."""
    agents = find_agents(venv)
    for agent in agents:
        print(f"Stopping the agent ({agent}); it saves its work.", flush=True)
        try:
            os.kill(agent.pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
    end_s, never = time.monotonic() + deadline_s, threading.Event()
    while (left := find_agents(venv)) and time.monotonic() < end_s:
        never.wait(LOOK_EVERY_S)
    return left


def main() -> int:
    """List or stop; exit 1 if one does not end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--list", action="store_true", help="say which there are, a line each")
    parser.add_argument("--folders", action="store_true", help="name their folders, a line each")
    parser.add_argument("--deadline-s", type=float, default=60.0)
    options = parser.parse_args()
    if options.list or options.folders:
        for agent in find_agents(options.venv):
            print(agent.home if options.folders else agent)
        return 0
    left = stop_agents(options.venv, options.deadline_s)
    for agent in left:
        print(f"It has not ended: {agent}.", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
