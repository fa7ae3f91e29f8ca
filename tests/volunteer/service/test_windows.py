"""The logon task, by the rules of its schema: fixture-tested only, never on Windows."""

from __future__ import annotations

from pathlib import Path, PureWindowsPath
from typing import cast
from xml.etree import ElementTree

import pytest

from tests.fakes.service_programs import FakeSchtasks
from tests.volunteer.service.task_schema import NAMESPACE, problems_of
from volunteer.service.service import ServiceCommand, ServiceError
from volunteer.service.windows import WindowsService, task_xml

PROGRAM = PureWindowsPath(r"C:\Users\Ada & Söhne\.local\bin\allmende.exe")
USER = r"HOME-PC\Ada & Söhne"
COMMAND = ServiceCommand(program=cast(Path, PROGRAM), variables={})


def make(schtasks: FakeSchtasks, *, can_run: bool = True) -> WindowsService:
    return WindowsService(command=COMMAND, user=USER, can_run=can_run, run=schtasks)


def test_the_task_keeps_the_rules_of_its_schema() -> None:
    text = task_xml(COMMAND, USER)
    assert problems_of(text) == []
    task = ElementTree.fromstring(text.partition("?>")[2])
    values = {one.tag.removeprefix(NAMESPACE): one.text for one in task.iter()}
    assert values["Command"] == str(PROGRAM)
    assert values["Arguments"] == "start --foreground"
    assert values["UserId"] == USER
    assert values["LogonType"] == "InteractiveToken"
    assert values["RunLevel"] == "LeastPrivilege"
    assert values["ExecutionTimeLimit"] == "PT0S"
    assert values["DisallowStartIfOnBatteries"] == "false"
    assert int(values["Priority"] or 0) >= 7


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("<Priority>8</Priority>", "<Priority>11</Priority>", "Task/Settings/Priority: '11'"),
        ("<Priority>8</Priority>", "", ""),
        ("PT0S", "60", "Task/Settings/ExecutionTimeLimit: '60'"),
        ("InteractiveToken", "Interactive", "Task/Principals/Principal/LogonType"),
        ("<Count>5</Count>", "", "RestartOnFailure: Count is missing"),
        ("<Delay>PT30S</Delay>", "<Pause>PT30S</Pause>", "Pause is no child of it"),
        ("<Enabled>true</Enabled>\n      <UserId>", "<UserId>", ""),
        ('Context="Author"', 'Context="Nobody"', "no principal Nobody"),
        ('encoding="UTF-16"', 'encoding="UTF-8"', "not declared as UTF-16"),
    ],
)
def test_the_check_of_the_schema_finds_what_breaks_it(old: str, new: str, problem: str) -> None:
    text = task_xml(COMMAND, USER)
    assert text.count(old) == 1
    found = problems_of(text.replace(old, new))
    assert any(problem in one for one in found) if problem else found == []


def test_the_order_of_a_trigger_counts() -> None:
    text = task_xml(COMMAND, USER)
    delay = "      <Delay>PT30S</Delay>\n"
    moved = text.replace(delay, "").replace("<LogonTrigger>\n", f"<LogonTrigger>\n{delay}")
    assert "the order is" in problems_of(moved)[0]


def test_it_is_registered_started_and_removed() -> None:
    schtasks = FakeSchtasks()
    service = make(schtasks)
    assert not service.status().is_installed
    service.install(is_now=False)
    service.install(is_now=False)
    assert schtasks.tasks == {"allmende": service.definition()}
    assert service.status().is_current
    assert not service.status().is_running
    service.install(is_now=True)
    assert service.status().is_running
    schtasks.tasks["allmende"] = schtasks.tasks["allmende"].replace("start", "fly")
    assert not service.status().is_current
    assert service.uninstall()
    assert schtasks.tasks == {}
    assert schtasks.running == set()
    assert not service.uninstall()


def test_where_the_agent_cannot_run_no_task_is_left_to_fail() -> None:
    schtasks = FakeSchtasks()
    with pytest.raises(ServiceError, match="does not run under Windows"):
        make(schtasks, can_run=False).install(is_now=False)
    assert schtasks.tasks == {}


def test_a_folder_of_its_own_cannot_be_named() -> None:
    command = ServiceCommand(
        program=cast(Path, PROGRAM), home="C:\\x", variables={"ALLMENDE_HOME": "C:\\x"}
    )
    with pytest.raises(ServiceError, match="knows no variables"):
        task_xml(command, USER)
