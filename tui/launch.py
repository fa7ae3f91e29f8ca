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
    # Not rotated here: another agent may be writing to it. The agent does so once it may.
    descriptor = os.open(log_file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        log_start = os.fstat(descriptor).st_size
        process = subprocess.Popen(
            [*AGENT_COMMAND, *options.to_argv()],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
        )
        status = _wait_up(process, locations, deadline_s, cancelled)
        if status is not None:
            return status
        message = f"the agent has not answered within {deadline_s:g} s"
        if process.returncode is not None:
            message = f"the agent ended at once, with exit status {process.returncode}"
        words = _last_words(descriptor, log_start, log_file)
    finally:
        os.close(descriptor)
    if words:
        message = "\n  ".join([f"{message}; its last words:", *words])
    # Popen warns when it is forgotten while the process runs; outliving us is the point.
    process.returncode = process.returncode or 0
    raise ControlError(message, hint=f"see {log_file}")


def _wait_up(
    process: subprocess.Popen[bytes],
    locations: Locations,
    deadline_s: float,
    cancelled: threading.Event | None,
) -> Status | None:
    """Wait until the agent answers; None if it has ended, or not answered in time."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and not (cancelled is not None and cancelled.is_set()):
        status = find_agent(locations)
        if status is not None:
            process.returncode = 0  # as above: it is left to itself
            return status
        if _has_ended(process):
            return None
    return None


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=_POLL_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _last_words(descriptor: int, log_start: int, log_file: Path) -> list[str]:
    """Return the last lines that were logged since `log_start` (bytes).

    Args:
        descriptor: the log as it was opened; the agent may have rotated it since.
        log_start: where the agent's own lines begin there.
        log_file: the log by its name.
    """
    own = os.fstat(descriptor)
    start = max(log_start, own.st_size - _TAIL_BYTES)
    # Not seek and read: the agent's stderr shares the position.
    data = os.pread(descriptor, _TAIL_BYTES, start)
    if log_file.exists() and not os.path.samestat(own, log_file.stat()):
        with log_file.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
            data += log.read(_TAIL_BYTES)
    lines = data.decode("utf-8", errors="replace").splitlines()
    return [clean(line) for line in lines[-_TAIL_LINES:] if line.strip()]


def exec_agent(options: AgentOptions) -> int:
    """Become the agent (`--foreground`); returns its exit status only where exec cannot be had."""
    command = [*AGENT_COMMAND, *options.to_argv()]
    if os.name == "posix":
        os.execv(command[0], command)  # noqa: S606 - replaces this process, without a shell
    return subprocess.call(command)
