"""Starting the agent in the background, and telling what went wrong if it does not come up.

Runs in: tui and command line. The agent is another program to us (no import): its command line is
the whole contract, and it outlives whoever started it. No file of the folder that the user stands
in is ever run: it is neither on the agent's path (`-P`) nor its current folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tui.client import CHANGE_DEADLINE_S, ControlClient
from tui.wording import clean
from volunteer.answers import Status
from volunteer.errors import ConfigError, ControlError, NoAgentError
from volunteer.files import PRIVATE_FILE_MODE
from volunteer.locations import HOME_VARIABLE, Locations

if TYPE_CHECKING:
    from volunteer.config import Config

AGENT_COMMAND = (sys.executable, "-P", "-m", "volunteer.agent")
OWNER_STARTS = "--owner-starts"
"""Tells the agent that it is not the system that starts it: a stop that was to come is over then.
"""
AGENT_FOLDER = "/"
# Also so that no disk stays busy for it.
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
    no_mdns: bool = False
    """Do not look for members on the local network."""
    no_dht: bool = False
    """Do not look for members through other peers."""
    ignore_idle: bool = False
    """Contribute whatever the idle policy says."""
    device: str | None = None
    """As torch names it; None: the agent chooses."""
    run_file: Path | None = None
    """A RunSpec file; None: the run of the package."""
    round_s: float | None = None
    """Length of a round in seconds, for runs of one's own."""
    threads: int | None = None
    """CPU threads of the trainer; None: as configured."""

    def to_argv(self) -> tuple[str, ...]:
        """Return the agent's arguments, always in the same order."""
        argv = [part for addr in self.listen for part in ("--listen", addr)]
        argv += [part for addr in self.bootstrap for part in ("--bootstrap", addr)]
        argv += ["--no-mdns"] if self.no_mdns else []
        argv += ["--no-dht"] if self.no_dht else []
        argv += ["--ignore-idle"] if self.ignore_idle else []
        argv += ["--device", self.device] if self.device is not None else []
        argv += ["--run-file", str(self.run_file.absolute())] if self.run_file else []
        argv += ["--round-s", f"{self.round_s:g}"] if self.round_s is not None else []
        argv += ["--threads", str(self.threads)] if self.threads is not None else []
        return tuple(argv)

    def overrides(self) -> dict[str, object]:
        """Return the flags that stand in place of a line of the configuration."""
        return {
            "device": self.device,
            "threads": self.threads,
            "listen": self.listen or None,
            "bootstrap": self.bootstrap or None,
        }


def verify_wishes(locations: Locations, options: AgentOptions) -> None:
    """Check what the agent would refuse, while it can still be said without its log.

    Raises:
        ConfigError: the file or a flag is not valid, or a folder cannot be used.
        RunSpecError: the RunSpec file is not valid, or not what its publisher has signed, or
            would read files of this machine unasked.
        VolunteerError: the own key cannot be read.
    """
    from volunteer.config import load_config

    config = load_config(locations.config_file, options.overrides())
    if options.run_file is not None:
        _verify_run(locations, options.run_file, options.round_s, config)
    locations.prepare()


def _verify_run(
    locations: Locations, run_file: Path, round_s: float | None, config: Config
) -> None:
    """Check a run as the agent does; no key is made for it."""
    from volunteer.own_identity import read_identity
    from volunteer.run import read_run_spec
    from volunteer.run_owner import verify_publisher, verify_round_length, verify_sources

    spec, source = read_run_spec(run_file), str(run_file)
    verify_publisher(spec, source=source)
    verify_round_length(spec, round_s, source=source)
    me = read_identity(locations).peer_id if locations.identity_file.exists() else ""
    verify_sources(spec, config, me)


def _agent_environment() -> dict[str, str]:
    """Return our environment, with a folder in it that is the same from any current folder."""
    home = os.environ.get(HOME_VARIABLE)
    if not home:
        return dict(os.environ)
    return {**os.environ, HOME_VARIABLE: str(Locations.from_environment(os.environ).data_dir)}


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


def is_agent_there(locations: Locations) -> bool:
    """Tell whether something answers, whatever it says."""
    try:
        return find_agent(locations) is not None
    except ControlError:
        return True


def running_options(agent_pid: int) -> tuple[str, ...] | None:
    """Return the arguments of the running agent, or None where the system does not tell."""
    import psutil

    try:
        command = psutil.Process(agent_pid).cmdline()
    except (psutil.Error, ValueError):
        return None
    module = AGENT_COMMAND[-1]
    if module not in command:
        return None
    return tuple(flag for flag in command[command.index(module) + 1 :] if flag != OWNER_STARTS)


def verify_same_options(running: Status, options: AgentOptions) -> None:
    """Check that the running agent is what was asked for.

    Raises:
        ControlError: it was started with other flags, or the system does not tell with which.
    """
    wanted = options.to_argv()
    if not wanted or running_options(running.agent_pid) == wanted:
        return
    raise ControlError(
        f"an agent runs already (process {running.agent_pid}), and not with these flags",
        hint=f"`allmende stop` first; or set {HOME_VARIABLE} to another folder for a second one",
    )


def keep_running(locations: Locations, running: Status, options: AgentOptions) -> Status:
    """Have an agent go on, also if it was to stop with this round: its owner starts it.

    Raises:
        ControlError: it runs with other flags; or it has just ended, or refuses.
    """
    verify_same_options(running, options)
    if not running.stops_then:
        return running
    with ControlClient(locations.control_socket, deadline_s=CHANGE_DEADLINE_S) as client:
        client.request("resume", object)
        return client.request("status", Status)


def start_agent(
    locations: Locations,
    argv: Sequence[str],
    *,
    deadline_s: float = START_DEADLINE_S,
    cancelled: threading.Event | None = None,
) -> Status:
    """Start the agent, detached, and wait until it answers.

    Args:
        locations: where its socket and its log are.
        argv: its flags (`AgentOptions.to_argv`).
        deadline_s: for its first answer.
        cancelled: gives up the waiting, not the agent.

    Raises:
        ControlError: it ended or does not answer; the message has the last lines of its log.
        ConfigError: a folder cannot be used.
    """
    locations.prepare()
    log_file = locations.log_dir / "agent.log"
    descriptor = _open_log(log_file)
    try:
        log_start = os.fstat(descriptor).st_size
        process = subprocess.Popen(
            [*AGENT_COMMAND, OWNER_STARTS, *argv],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            cwd=AGENT_FOLDER,
            env=_agent_environment(),
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


def _open_log(log_file: Path) -> int:
    """Open the log for appending; another agent may be writing to it, so it is not rotated here."""
    try:
        return os.open(log_file, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE_FILE_MODE)
    except OSError as error:
        raise ConfigError(
            f"{log_file} cannot be written: {error.strerror}",
            hint=f"make it writable, or set {HOME_VARIABLE} to a folder of your own",
        ) from error


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


def exec_agent(argv: Sequence[str]) -> int:
    """Become the agent (`--foreground`); returns its exit status only where exec cannot be had.

    Service managers start it so as well: it is the owner who does where there is a terminal.
    """
    owners = [OWNER_STARTS] if sys.stdin is not None and sys.stdin.isatty() else []
    command, environment = [*AGENT_COMMAND, *owners, *argv], _agent_environment()
    os.chdir(AGENT_FOLDER)
    if os.name == "posix":
        os.execve(command[0], command, environment)  # noqa: S606 - replaces this process, no shell
    return subprocess.call(command, env=environment)
