"""A logon task of Windows.

Runs in: the command line. A task and no service of Windows: services see neither the keyboard nor,
mostly, the GPU. Elements, their order and values: Microsoft's Task Scheduler schema, version 1.2.
`Priority` 8 is the lowest but idle, with low I/O priority.
"""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Final
from xml.etree import ElementTree

from volunteer.service.service import (
    DESCRIPTION,
    Finished,
    Runner,
    ServiceCommand,
    ServiceError,
    ServiceStatus,
    run_program,
)

NAMESPACE: Final = "http://schemas.microsoft.com/windows/2004/02/mit/task"
_SETTINGS: Final = (
    ("MultipleInstancesPolicy", "IgnoreNew"),
    # The agent itself sees to the battery, and ends nothing that could be saved.
    ("DisallowStartIfOnBatteries", "false"),
    ("StopIfGoingOnBatteries", "false"),
    ("AllowHardTerminate", "true"),
    ("StartWhenAvailable", "true"),
    ("AllowStartOnDemand", "true"),
    ("Enabled", "true"),
    ("Hidden", "false"),
    ("RunOnlyIfIdle", "false"),
    ("WakeToRun", "false"),
    ("ExecutionTimeLimit", "PT0S"),  # none; the default ends it after three days
    ("Priority", "8"),
)
_RESTART: Final = (("Interval", "PT1M"), ("Count", "5"))


def task_xml(command: ServiceCommand, user: str) -> str:
    """Return the task that runs `command` when `user` logs on.

    Raises:
        ServiceError: the volunteer has a folder of its own, which a task cannot name.
    """
    if command.variables:
        raise ServiceError(
            "a logon task knows no variables, and ALLMENDE_HOME is set",
            hint="unset it, and name the folder for all your programs: setx ALLMENDE_HOME FOLDER",
        )
    task = ElementTree.Element("Task", {"version": "1.2", "xmlns": NAMESPACE})
    about = ElementTree.SubElement(task, "RegistrationInfo")
    _add(about, ("Description", DESCRIPTION))
    trigger = ElementTree.SubElement(ElementTree.SubElement(task, "Triggers"), "LogonTrigger")
    _add(trigger, ("Enabled", "true"), ("UserId", user), ("Delay", "PT30S"))
    principals = ElementTree.SubElement(task, "Principals")
    principal = ElementTree.SubElement(principals, "Principal", {"id": "Author"})
    _add(principal, ("UserId", user), ("LogonType", "InteractiveToken"))
    _add(principal, ("RunLevel", "LeastPrivilege"))
    settings = ElementTree.SubElement(task, "Settings")
    _add(settings, *_SETTINGS)
    _add(ElementTree.SubElement(settings, "RestartOnFailure"), *_RESTART)
    actions = ElementTree.SubElement(task, "Actions", {"Context": "Author"})
    program, *arguments = command.argv
    _add(
        ElementTree.SubElement(actions, "Exec"),
        ("Command", program),
        ("Arguments", subprocess.list2cmdline(arguments)),
        ("WorkingDirectory", str(PureWindowsPath(program).parent)),
    )
    ElementTree.indent(task)
    text = ElementTree.tostring(task, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-16"?>\n{text}\n'


def _add(parent: ElementTree.Element, *children: tuple[str, str]) -> None:
    for name, text in children:
        ElementTree.SubElement(parent, name).text = text


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowsService:
    """The logon task of one volunteer."""

    command: ServiceCommand
    user: str
    """As `DOMAIN\\name`."""
    can_run: bool
    """Whether this system has what the agent needs."""
    run: Runner = run_program

    def definition(self) -> str:
        """Return the task."""
        return task_xml(self.command, self.user)

    def install(self, *, is_now: bool) -> None:
        """Register the task, in place of an older one, and start it if wanted.

        Raises:
            ServiceError: the agent could not run here, or the Task Scheduler refuses.
        """
        if not self.can_run:
            raise ServiceError(
                "the agent does not run under Windows yet: a task would fail at each logon",
                hint="Linux and macOS work; under Windows use WSL 2",
            )
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "task.xml"
            file.write_text(self.definition(), encoding="utf-16")
            self._tell("/Create", "/TN", self.command.name, "/XML", str(file), "/F")
        if is_now:
            self._tell("/Run", "/TN", self.command.name)

    def uninstall(self) -> bool:
        """End the task and delete it.

        Raises:
            ServiceError: the Task Scheduler refuses.
        """
        if not self._is_there():
            return False
        self._schtasks("/End", "/TN", self.command.name)  # fails where it does not run
        self._tell("/Delete", "/TN", self.command.name, "/F")
        return True

    def status(self) -> ServiceStatus:
        """Return how it stands with it."""
        told = self._schtasks("/Query", "/TN", self.command.name, "/FO", "CSV", "/NH")
        is_installed = told.status == 0
        return ServiceStatus(
            name=self.command.name,
            kind="logon task",
            is_installed=is_installed,
            is_enabled=is_installed,
            is_running=is_installed and '"Running"' in told.stdout,
            is_current=is_installed and self._has_same_action(),
        )

    def _is_there(self) -> bool:
        return self._schtasks("/Query", "/TN", self.command.name).status == 0

    def _has_same_action(self) -> bool:
        """Return whether the task runs our command; the Task Scheduler adds elements of its own."""
        told = self._schtasks("/Query", "/TN", self.command.name, "/XML")
        try:
            task = ElementTree.fromstring(told.stdout.partition("?>")[2] or told.stdout)  # noqa: S314 -- the system's own
        except ElementTree.ParseError:
            return False
        words = [task.findtext(f".//{{{NAMESPACE}}}{name}") for name in ("Command", "Arguments")]
        program, *arguments = self.command.argv
        return words == [program, subprocess.list2cmdline(arguments)]

    def _schtasks(self, *arguments: str) -> Finished:
        return self.run(("schtasks", *arguments))

    def _tell(self, *arguments: str) -> None:
        done = self._schtasks(*arguments)
        if done.status != 0:
            raise ServiceError(f"the Task Scheduler refuses ({arguments[0]}): {done.last_words}")
