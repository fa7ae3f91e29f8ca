"""A user unit of systemd.

Runs in: the command line. The unit is wanted by `default.target`, not by the graphical session, so
that it also runs on a machine without one; the agent's sensors find a session when it appears. Why
each line: systemd.service(5), systemd.exec(5) and systemd.kill(5).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from volunteer.files import replace_file
from volunteer.service.service import (
    DESCRIPTION,
    RESTART_AFTER_S,
    STOP_DEADLINE_S,
    Finished,
    Runner,
    ServiceCommand,
    ServiceError,
    ServiceStatus,
    run_program,
)

UNIT_FILE_MODE: Final = 0o644
TARGET: Final = "default.target"
LINGER_DIR: Final = Path("/var/lib/systemd/linger")
"""A file for each user whose manager runs without a login."""
_OFF: Final = "there is no user manager of systemd here that could start it"
_OFF_HINT: Final = (
    "log in at this machine itself (not by su or in a container), or use `allmende start`"
)
UNIT: Final = """\
# Written by `allmende service install`; `allmende service uninstall` removes it.
[Unit]
Description={description}
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
ExecStart={command}
{environment}\
# `allmende stop` is meant to last: only a crash starts it again. Exit status 2 is a setting that is
# not valid; that would be the same the next time.
Restart=on-failure
RestartSec={restart_s}
RestartPreventExitStatus=2
# The agent alone is told to end: it has the others save their work. What is left then is killed.
KillMode=mixed
TimeoutStopSec={stop_s}
Nice=19
CPUSchedulingPolicy=idle
CPUWeight=idle
IOSchedulingClass=idle
OOMScoreAdjust=500
# If it does not start after an upgrade of Python: `pipx reinstall allmende`.

[Install]
WantedBy={target}
"""


def quoted(text: str) -> str:
    """Return one word of a command line or assignment as systemd reads it back."""
    for special, escaped in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%")):
        text = text.replace(special, escaped)
    return f'"{text}"'


def unit_text(command: ServiceCommand) -> str:
    """Return the unit that runs `command`."""
    # A dollar sign begins a variable in a command line, and does not in Environment=.
    words = (quoted(word).replace("$", "$$") for word in command.argv)
    lines = (f"{name}={value}" for name, value in sorted(command.variables.items()))
    return UNIT.format(
        description=DESCRIPTION,
        command=" ".join(words),
        environment="".join(f"Environment={quoted(line)}\n" for line in lines),
        restart_s=RESTART_AFTER_S,
        stop_s=STOP_DEADLINE_S,
        target=TARGET,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemdService:
    """The unit of one volunteer."""

    command: ServiceCommand
    units_dir: Path
    """Where the owner's units lie."""
    user: str
    """Whose manager it is, by name."""
    run: Runner = run_program
    linger_dir: Path = LINGER_DIR

    @property
    def unit(self) -> str:
        """The unit's name."""
        return f"{self.command.name}.service"

    @property
    def file(self) -> Path:
        """The unit's file."""
        return self.units_dir / self.unit

    @property
    def _wanted_file(self) -> Path:
        return self.units_dir / f"{TARGET}.wants" / self.unit

    def definition(self) -> str:
        """Return the unit."""
        return unit_text(self.command)

    def install(self, *, is_now: bool) -> None:
        """Write the unit, enable it, and start it if wanted.

        Raises:
            ServiceError: there is no user manager, or it refuses.
            OSError: the unit cannot be written.
        """
        manager = self._ask("show", "--property=Version")
        if manager.status != 0:
            raise ServiceError(f"{_OFF}: {manager.last_words}", hint=_OFF_HINT)
        if self._read() != self.definition():
            self.units_dir.mkdir(parents=True, exist_ok=True)
            replace_file(self.file, self.definition().encode(), mode=UNIT_FILE_MODE)
        self._tell("daemon-reload")
        self._tell("enable", self.unit)
        if is_now:
            self._tell("start", self.unit)

    def uninstall(self) -> bool:
        """Stop it, take it from login, and remove its files; a manager is not needed for that.

        Raises:
            ServiceError: a file of it cannot be removed, or it still runs.
        """
        was_there = self._was_there()
        has_manager = self._ask("show", "--property=Version").status == 0
        if has_manager and was_there:
            stopped = self._ask("disable", "--now", self.unit)
            if self._ask("is-active", self.unit).stdout.strip() in ("active", "deactivating"):
                raise ServiceError(f"{self.unit} still runs: {stopped.last_words}")
        try:
            for file in (self._wanted_file, self.file):
                file.unlink(missing_ok=True)
            self._remove_empty_folders()
        except OSError as error:
            raise ServiceError(f"{error.filename} could not be removed: {error}") from error
        if has_manager and was_there:
            self._tell("daemon-reload")
            self._ask("reset-failed", self.unit)  # fails where it had not failed
        return was_there

    def status(self) -> ServiceStatus:
        """Return how it stands with it."""
        text = self._read()
        is_linked = os.path.lexists(self._wanted_file)
        is_active = text is not None and self._ask("is-active", self.unit).status == 0
        failed = self._ask("is-failed", self.unit).status == 0 if text is not None else False
        problem = ""
        if failed:
            problem = f"it failed: `journalctl --user -u {self.unit}` says why"
        elif text is not None and not is_linked:
            problem = "it is not enabled: `allmende service install` does that"
        return ServiceStatus(
            name=self.unit,
            kind="systemd user unit",
            is_installed=text is not None,
            is_enabled=text is not None and is_linked,
            is_running=is_active,
            is_current=text == self.definition(),
            file=str(self.file),
            problem=problem,
            is_before_login=(self.linger_dir / self.user).exists(),
        )

    def _was_there(self) -> bool:
        return os.path.lexists(self.file) or os.path.lexists(self._wanted_file)

    def _read(self) -> str | None:
        try:
            return self.file.read_text("utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _remove_empty_folders(self) -> None:
        """Remove the folders that `install` may have made, where nothing else is in them."""
        systemd_dir = self.units_dir.parent
        for folder in (self._wanted_file.parent, self.units_dir, systemd_dir, systemd_dir.parent):
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue  # systemd has removed it already
            except OSError:
                return  # others use it

    def _ask(self, *arguments: str) -> Finished:
        return self.run(("systemctl", "--user", *arguments))

    def _tell(self, *arguments: str) -> None:
        done = self._ask(*arguments)
        if done.status != 0:
            raise ServiceError(
                f"systemd would not {' '.join(arguments)}: {done.last_words}",
                hint=f"`systemctl --user status {self.unit}` says more",
            )


def units_dir(environ: Mapping[str, str], home_dir: Path) -> Path:
    """Return where systemd looks for a user's own units."""
    config = environ.get("XDG_CONFIG_HOME", "")
    # The manager was started with the login's value; a relative one is none (XDG base directories).
    base = Path(config) if config and os.path.isabs(config) else home_dir / ".config"
    return base / "systemd" / "user"
