"""Starting the agent in the background, and telling what went wrong if it does not come up.

Runs in: tui and command line. The agent is another program to us (no import): its command line is
the whole contract, and it outlives whoever started it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from tui.client import ControlClient
from tui.wording import clean
from volunteer.errors import ControlError, NoAgentError
from volunteer.locations import Locations
from volunteer.messages import Status

AGENT_COMMAND = (sys.executable, "-m", "volunteer.agent")
START_DEADLINE_S = 20.0
_POLL_S = 0.05
_TAIL_LINES = 12
_TAIL_BYTES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """The flags of `allmende start` that the agent takes as they are."""

    listen: tuple[str, ...] = ()
    """Multiaddrs to listen on; empty: as configured."""
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs of peers to begin with."""
    ignore_idle: bool = False
    """Contribute whatever the idle policy says."""
    device: str | None = None
    """As torch names it; None: the agent chooses."""
    round_s: float | None = None
    """Length of a round in seconds, for runs of one's own."""
    threads: int | None = None
    """CPU threads of the trainer; None: as configured."""

    def to_argv(self) -> tuple[str, ...]:
        """Return the agent's arguments, always in the same order."""
        argv = [part for addr in self.listen for part in ("--listen", addr)]
        argv += [part for addr in self.bootstrap for part in ("--bootstrap", addr)]
        argv += ["--ignore-idle"] if self.ignore_idle else []
        argv += ["--device", self.device] if self.device is not None else []
        argv += ["--round-s", f"{self.round_s:g}"] if self.round_s is not None else []
        argv += ["--threads", str(self.threads)] if self.threads is not None else []
        return tuple(argv)


def find_agent(locations: Locations) -> Status | None:
    """Return the status of the agent that runs, or None if none does.

    Raises:
        ControlError: something answers, but refuses or is not understood.
    """
    try:
        with ControlClient(locations.control_socket) as client:
            return client.request("status", Status)
    except NoAgentError:
        return None


def running_options(agent_pid: int) -> tuple[str, ...] | None:
    """Return the arguments of the running agent, or None where the system does not tell."""
    import psutil

    try:
        command = psutil.Process(agent_pid).cmdline()
    except (psutil.Error, ValueError):
        return None
    module = AGENT_COMMAND[-1]
    return tuple(command[command.index(module) + 1 :]) if module in command else None


def start_agent(
    locations: Locations,
    options: AgentOptions,
    *,
    deadline_s: float = START_DEADLINE_S,
    cancelled: threading.Event | None = None,
) -> Status:
    """Start the agent, detached, and wait until it answers.

    Args:
        locations: where its socket and its log are.
        options: its flags.
        deadline_s: for its first answer.
        cancelled: gives up the waiting, not the agent.

    Raises:
        ControlError: it ended or does not answer; the message has the last lines of its log.
    """
    locations.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_file = locations.log_dir / "agent.log"
    descriptor = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as log:
        log_start = log.tell()
        process = subprocess.Popen(
            [*AGENT_COMMAND, *options.to_argv()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and not (cancelled is not None and cancelled.is_set()):
        status = find_agent(locations)
        if status is not None:
            # Popen warns when it is forgotten while the process runs; outliving us is the point.
            process.returncode = 0
            return status
        if _has_ended(process):
            message = f"the agent ended at once, with exit status {process.returncode}"
            raise ControlError(_with_log(message, log_file, log_start), hint=f"see {log_file}")
    process.returncode = 0
    message = f"the agent has not answered within {deadline_s:g} s"
    raise ControlError(_with_log(message, log_file, log_start), hint=f"see {log_file}")


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _with_log(message: str, log_file: Path, log_start: int) -> str:
    """Append the last lines that were written to the log since `log_start` (bytes)."""
    with log_file.open("rb") as log:
        end = log.seek(0, os.SEEK_END)
        log.seek(max(log_start, end - _TAIL_BYTES))
        lines = log.read().decode("utf-8", errors="replace").splitlines()
    tail = [clean(line) for line in lines[-_TAIL_LINES:] if line.strip()]
    return "\n  ".join([f"{message}; its last words:", *tail]) if tail else message


def exec_agent(options: AgentOptions) -> int:
    """Become the agent (`--foreground`); returns its exit status only where exec cannot be had."""
    command = [*AGENT_COMMAND, *options.to_argv()]
    if os.name == "posix":
        os.execv(command[0], command)  # noqa: S606 - replaces this process, without a shell
    return subprocess.call(command)
