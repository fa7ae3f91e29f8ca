"""What every kind of service has: the command that it runs, its name, and the system's own program.

Runs in: the command line. One service for each folder (ALLMENDE_HOME), so that several volunteers
can live on one machine. The system's programs are called through a `Runner`, which tests replace.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from volunteer.errors import VolunteerError
from volunteer.locations import HOME_VARIABLE

DEADLINE_S: Final = 90.0
"""For one call of the system's program; stopping waits for the agent, which saves its work."""
STOP_DEADLINE_S: Final = 60
"""That the agent gets to save its work when the system ends it."""
RESTART_AFTER_S: Final = 30
"""After a crash."""
DESCRIPTION: Final = "Allmende: lends this machine while nobody uses it"
FOLDER_VARIABLES: Final = ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")
"""Say where the agent's folders are, where ALLMENDE_HOME does not; a shell may have them, and what
the system starts at login may not."""


class ServiceError(VolunteerError):
    """The service could not be changed."""


class Finished(NamedTuple):
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def last_words(self) -> str:
        """The last line that it wrote, for people."""
        lines = (self.stderr.strip() or self.stdout.strip()).splitlines()
        return lines[-1] if lines else f"exit status {self.status}"


Runner = Callable[[Sequence[str]], Finished]


def run_program(argv: Sequence[str]) -> Finished:
    """Run one of the system's programs to its end.

    Raises:
        ServiceError: it is not here, or does not end in time.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise ServiceError(
            f"`{argv[0]}` is not here, which would start the service",
            hint="`allmende start` goes on until the machine is switched off",
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServiceError(f"`{' '.join(argv[:3])}` failed: {error}") from error
    return Finished(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """What the system is to start at login."""

    program: Path
    """The command `allmende`, by a name that an upgrade of Python does not change."""
    home: str = ""
    """ALLMENDE_HOME, absolute; empty: the usual folders."""
    variables: Mapping[str, str]
    """Of the environment that it needs."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The command and its arguments; it becomes the agent."""
        return (str(self.program), "start", "--foreground")

    @property
    def name(self) -> str:
        """The service's name: its own for each folder that was named."""
        if not self.home:
            return "allmende"
        return f"allmende-{hashlib.blake2b(os.fsencode(self.home), digest_size=4).hexdigest()}"


def service_command(program: Path, environ: Mapping[str, str]) -> ServiceCommand:
    """Return the command for the volunteer whose folders `environ` names.

    Raises:
        ServiceError: a variable holds what no definition can say.
    """
    home_text = environ.get(HOME_VARIABLE, "")
    home = os.path.abspath(os.path.expanduser(home_text)) if home_text else ""
    variables = {HOME_VARIABLE: home} if home else {}
    if not home:
        variables = {name: environ[name] for name in FOLDER_VARIABLES if environ.get(name)}
    for text in (str(program), *variables.values()):
        if not text.isprintable():
            raise ServiceError(f"{text!r} has a character that a service cannot have in its name")
    return ServiceCommand(program=program, home=home, variables=variables)


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`allmende service status --json`: fields may be added, never renamed."""

    name: str
    kind: str
    """`systemd user unit`, `LaunchAgent` or `logon task`."""
    is_installed: bool
    is_enabled: bool = False
    """Whether it starts at the next login."""
    is_running: bool = False
    """Whether the system runs it now; an agent that was started by hand does not count."""
    is_current: bool = False
    """Whether it is what `service install` would write now."""
    file: str = ""
    """Its definition; empty where the system keeps it out of sight."""
    problem: str = ""
    """What is wrong with it, and what to do; empty where all is well."""
    is_before_login: bool | None = None
    """Whether it starts with the machine, before anybody logs in; None: it never does."""


class Service(Protocol):
    """One kind of service."""

    def definition(self) -> str:
        """Return what `install` would write."""

    def install(self, *, is_now: bool) -> None:
        """Have the system start it at login, and `is_now` at once as well; again changes nothing.

        Raises:
            ServiceError: the system refuses, or has nobody who would start it.
        """

    def uninstall(self) -> bool:
        """End it and leave nothing of it; return whether there was anything.

        Raises:
            ServiceError: something of it is still there.
        """

    def status(self) -> ServiceStatus:
        """Return how it stands with it."""
