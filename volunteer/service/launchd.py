"""A LaunchAgent of macOS.

Runs in: the command line. Keys: launchd.plist(5). It belongs to the user's graphical session, since
only there the keyboard's idle time can be read.
"""

from __future__ import annotations

import plistlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from volunteer.files import replace_file
from volunteer.service.service import (
    RESTART_AFTER_S,
    STOP_DEADLINE_S,
    Finished,
    Runner,
    ServiceCommand,
    ServiceError,
    ServiceStatus,
    run_program,
)

LABEL_PREFIX: Final = "org.allmende."
PLIST_FILE_MODE: Final = 0o644
NO_SUCH_SERVICE: Final = frozenset({3, 113})
"""Exit statuses of launchctl for what is not loaded: ESRCH, and its own."""


def agent_plist(command: ServiceCommand, label: str, log_file: Path) -> bytes:
    """Return the property list that runs `command`.

    Args:
        command: what to run.
        label: its name.
        log_file: where goes what is said before the agent has its log, which is the same file.
    """
    keys: dict[str, object] = {
        "Label": label,
        "ProgramArguments": list(command.argv),
        "RunAtLoad": True,
        # `allmende stop` is meant to last: only a crash starts it again.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": RESTART_AFTER_S,
        "ExitTimeOut": STOP_DEADLINE_S,
        "ProcessType": "Background",
        "LowPriorityIO": True,
        "LowPriorityBackgroundIO": True,
        "Nice": 19,
        "StandardErrorPath": str(log_file),
    }
    if command.variables:
        keys["EnvironmentVariables"] = dict(command.variables)
    return plistlib.dumps(keys, sort_keys=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchdService:
    """The LaunchAgent of one volunteer."""

    command: ServiceCommand
    agents_dir: Path
    """`~/Library/LaunchAgents`."""
    log_file: Path
    user_id: int
    run: Runner = run_program

    @property
    def label(self) -> str:
        """Its name among all of the user's."""
        return f"{LABEL_PREFIX}{self.command.name}"

    @property
    def file(self) -> Path:
        """Its property list."""
        return self.agents_dir / f"{self.label}.plist"

    def definition(self) -> str:
        """Return the property list."""
        return self._plist().decode()

    def _plist(self) -> bytes:
        return agent_plist(self.command, self.label, self.log_file)

    def install(self, *, is_now: bool) -> None:
        """Write it for the next login, and load it if wanted.

        Raises:
            ServiceError: there is no session to load it into, or launchd refuses.
            OSError: it cannot be written.
        """
        if is_now and self._launchctl("print", self._session).status != 0:
            raise ServiceError(
                "you are not logged in at this Mac's screen, so nobody could start it now",
                hint="without --now it starts with your next login there",
            )
        self.agents_dir.mkdir(parents=True, exist_ok=True)
        is_same = self._read() == self._plist()
        if not is_same:
            replace_file(self.file, self._plist(), mode=PLIST_FILE_MODE)
        self._tell("enable", self._target)  # `launchctl disable` outlives the file
        if is_now and not (is_same and self._is_loaded()):
            self._unload()
            self._tell("bootstrap", self._session, str(self.file))

    def uninstall(self) -> bool:
        """End it and remove its file.

        Raises:
            ServiceError: it could not be ended, or its file not be removed.
        """
        was_there = self.file.exists() or self._is_loaded()
        self._unload()
        try:
            self.file.unlink(missing_ok=True)
        except OSError as error:
            raise ServiceError(f"{self.file} could not be removed: {error}") from error
        return was_there

    def status(self) -> ServiceStatus:
        """Return how it stands with it."""
        plist = self._read()
        told = self._launchctl("print", self._target)
        is_running = told.status == 0 and "state = running" in told.stdout
        return ServiceStatus(
            name=self.label,
            kind="LaunchAgent",
            is_installed=plist is not None,
            is_enabled=plist is not None,
            is_running=is_running,
            is_current=plist == self._plist(),
            file=str(self.file),
        )

    @property
    def _session(self) -> str:
        return f"gui/{self.user_id}"

    @property
    def _target(self) -> str:
        return f"{self._session}/{self.label}"

    def _is_loaded(self) -> bool:
        return self._launchctl("print", self._target).status == 0

    def _unload(self) -> None:
        done = self._launchctl("bootout", self._target)
        if done.status not in (0, *NO_SUCH_SERVICE) and self._is_loaded():
            raise ServiceError(f"launchd would not end {self.label}: {done.last_words}")

    def _read(self) -> bytes | None:
        try:
            return self.file.read_bytes()
        except FileNotFoundError:
            return None

    def _launchctl(self, *arguments: str) -> Finished:
        return self.run(("launchctl", *arguments))

    def _tell(self, *arguments: str) -> None:
        done = self._launchctl(*arguments)
        if done.status != 0:
            raise ServiceError(f"launchd would not {arguments[0]} it: {done.last_words}")
