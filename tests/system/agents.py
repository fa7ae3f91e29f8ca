"""Real installed agents for system tests: started, watched, killed by their id.

Everything goes through the installed program: the console script starts them, the control socket
and the files on disk show what they do. Waiting is for a condition, never for a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from tui.client import ControlClient
from volunteer.agent.joined_run import chain_rules
from volunteer.agent.record_book import verify_envelope
from volunteer.agent.record_log import RecordLog
from volunteer.answers import ContributionPoint, RoundPoint, Stats, Status
from volunteer.errors import ControlError
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.rounds.knowledge import Knowledge
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import read_run_spec

PROGRAM = Path(sys.executable).with_name("allmende")
_T = TypeVar("_T")
_never = threading.Event()


def wait_until(what: str, condition: Callable[[], _T | None], deadline_s: float) -> _T:
    """Return the first value of `condition` that is true; AssertionError at the deadline."""
    end_s = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end_s:
            raise AssertionError(f"not within {deadline_s:g} s: {what}")
        _never.wait(0.05)


@dataclass
class RealAgent:
    """One volunteer in a folder of its own."""

    home: Path
    flags: Sequence[str] = ()
    pids: list[int] = field(default_factory=list)

    @property
    def locations(self) -> Locations:
        return Locations.from_environment({HOME_VARIABLE: str(self.home)})

    def allmende(self, *args: str, deadline_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run one command of the installed program for this volunteer."""
        return subprocess.run(
            [str(PROGRAM), *args],
            env={**os.environ, HOME_VARIABLE: str(self.home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )

    def start(self) -> Status:
        done = self.allmende("start", *self.flags, "--json")
        assert done.returncode == 0, done.stderr
        status = msgspec.json.decode(done.stdout, type=Status)
        self.pids.append(status.agent_pid)
        return status

    def ask(self, verb: str, reply_type: type[_T]) -> _T:
        with ControlClient(self.locations.control_socket, deadline_s=20.0) as client:
            return client.request(verb, reply_type)

    def status(self) -> Status:
        return self.ask("status", Status)

    def stats(self) -> Stats:
        return self.ask("stats", Stats)

    def history(self) -> list[RoundPoint]:
        return self.ask("history", list[RoundPoint])

    def contributions(self) -> list[ContributionPoint]:
        with ControlClient(self.locations.control_socket, deadline_s=20.0) as client:
            return client.request("contributions", list[ContributionPoint], {"limit": 1000})

    def wait_for(self, what: str, check: Callable[[Status], bool], deadline_s: float) -> Status:
        def look() -> Status | None:
            status = self.status()
            return status if check(status) else None

        return wait_until(f"{self.home.name}: {what}", look, deadline_s)

    def kill(self) -> list[int]:
        """SIGKILL the agent; return the ids of its children at that moment."""
        process = psutil.Process(self.pids[-1])
        children = [child.pid for child in process.children(recursive=True)]
        process.send_signal(signal.SIGKILL)
        wait_until("the agent is gone", lambda: not is_alive(process.pid), 10.0)
        return children

    def end(self) -> None:
        """Stop it, by force if need be."""
        with contextlib.suppress(ControlError, subprocess.TimeoutExpired):
            self.allmende("stop", deadline_s=30.0)
        for pid in self.pids:
            if is_alive(pid):
                psutil.Process(pid).kill()

    def chain(self) -> Knowledge:
        """Read this volunteer's signed records from a copy: the agent has its file for itself."""
        run_dir = next(iter(self.locations.runs_dir.iterdir()))
        spec = read_run_spec(run_dir / "spec.toml")
        known = Knowledge(chain_rules(spec))
        record_file = self.locations.record_file(spec.run_id, DENSE_MODULE)
        with tempfile.TemporaryDirectory() as folder:
            for file in record_file.parent.glob(f"{record_file.name}*"):
                shutil.copy(file, folder)
            log = RecordLog(Path(folder) / record_file.name)
            for envelope in log.all():
                signed = verify_envelope(envelope, spec.run_id, DENSE_MODULE)
                known.add(signed.record_id, signed.record)
            log.close()
        return known

    def logged(self) -> str:
        return (self.locations.log_dir / "agent.log").read_text("utf-8", errors="replace")


def is_alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def ending(agents: Sequence[RealAgent]) -> Iterator[None]:
    """End every agent afterwards, whatever happened; show the logs' ends if it failed."""
    try:
        yield
    except BaseException:
        for agent in agents:
            with contextlib.suppress(OSError):
                tail = "\n".join(agent.logged().splitlines()[-15:])
                sys.stderr.write(f"--- {agent.home.name}\n{tail}\n")
        raise
    finally:
        for agent in agents:
            agent.end()
