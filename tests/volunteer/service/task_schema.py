"""The rules of Microsoft's Task Scheduler schema, as far as a logon task needs them.

From the schema that its documents print (`taskschedulerschema`, target namespace
`http://schemas.microsoft.com/windows/2004/02/mit/task`): `xs:all` is any order, each child at most
once; `xs:sequence` is that order; what is not named here is no child at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree

NAMESPACE = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"
DURATION = re.compile(
    r"P(?=.)(\d+Y)?(\d+M)?(\d+D)?(T(?=.)(\d+H)?(\d+M)?(\d+(\.\d+)?S)?)?", re.ASCII
)
Check = Callable[[str], bool]


def one_of(*values: str) -> Check:
    return lambda text: text in values


def is_duration(text: str) -> bool:
    return DURATION.fullmatch(text) is not None


def in_range(least: int, most: int) -> Check:
    return lambda text: text.isascii() and text.isdecimal() and least <= int(text) <= most


def is_path(text: str) -> bool:
    return 1 <= len(text) <= 260


def is_restart_interval(text: str) -> bool:
    match = re.fullmatch(r"PT(\d+)M", text)
    return match is not None and 1 <= int(match[1]) <= 31 * 24 * 60


any_text: Check = lambda text: True  # noqa: E731 - a check like the others
some_text: Check = bool
boolean = one_of("true", "false", "0", "1")


@dataclass(frozen=True)
class Rule:
    """What an element may hold."""

    children: Mapping[str, Rule | Check] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()
    is_ordered: bool = False
    attributes: frozenset[str] = frozenset()


RULE = Rule(
    needed=frozenset({"Actions"}),
    attributes=frozenset({"version"}),
    children={
        "RegistrationInfo": Rule(
            dict.fromkeys(("URI", "Source", "Author", "Version", "Description"), any_text)
        ),
        "Triggers": Rule(
            {
                "LogonTrigger": Rule(
                    {
                        "Enabled": boolean,
                        "StartBoundary": some_text,
                        "EndBoundary": some_text,
                        "ExecutionTimeLimit": is_duration,
                        "UserId": some_text,
                        "Delay": is_duration,
                    },
                    is_ordered=True,
                    attributes=frozenset({"id"}),
                )
            }
        ),
        "Principals": Rule(
            {
                "Principal": Rule(
                    {
                        "UserId": some_text,
                        "LogonType": one_of(
                            "S4U", "Password", "InteractiveToken", "InteractiveTokenOrPassword"
                        ),
                        "DisplayName": any_text,
                        "RunLevel": one_of("LeastPrivilege", "HighestAvailable"),
                    },
                    attributes=frozenset({"id"}),
                )
            },
            needed=frozenset({"Principal"}),
        ),
        "Settings": Rule(
            {
                **dict.fromkeys(
                    (
                        *("AllowStartOnDemand", "DisallowStartIfOnBatteries", "Enabled", "Hidden"),
                        *("StopIfGoingOnBatteries", "AllowHardTerminate", "StartWhenAvailable"),
                        *("RunOnlyIfNetworkAvailable", "WakeToRun", "RunOnlyIfIdle"),
                    ),
                    boolean,
                ),
                "RestartOnFailure": Rule(
                    {"Interval": is_restart_interval, "Count": in_range(1, 255)},
                    needed=frozenset({"Interval", "Count"}),
                ),
                "MultipleInstancesPolicy": one_of("Parallel", "Queue", "IgnoreNew", "StopExisting"),
                "ExecutionTimeLimit": is_duration,
                "Priority": in_range(0, 10),
            }
        ),
        "Actions": Rule(
            {
                "Exec": Rule(
                    {"Command": is_path, "Arguments": any_text, "WorkingDirectory": is_path},
                    needed=frozenset({"Command"}),
                    attributes=frozenset({"id"}),
                )
            },
            needed=frozenset({"Exec"}),
            attributes=frozenset({"Context"}),
        ),
    },
)


def problems_of(text: str) -> list[str]:
    """Return what the schema forbids in a task, a line each."""
    declaration, _, body = text.partition("?>")
    found = [] if 'encoding="UTF-16"' in declaration else ["it is not declared as UTF-16"]
    task = ElementTree.fromstring(body)
    if task.tag != f"{NAMESPACE}Task":
        return [*found, f"the root is {task.tag}"]
    if not re.fullmatch(r"\d+(\.\d+){1,3}", task.get("version", "1.0")):
        found.append(f"version {task.get('version')}")
    principals = {one.get("id") for one in task.iter(f"{NAMESPACE}Principal")}
    contexts = {one.get("Context") for one in task.iter(f"{NAMESPACE}Actions")} - {None}
    found += [f"no principal {one}" for one in contexts - principals]
    return found + _problems(task, RULE, "Task")


def _problems(element: ElementTree.Element, rule: Rule, where: str) -> list[str]:
    names = [child.tag.removeprefix(NAMESPACE) for child in element]
    found = [f"{where}: {one} twice" for one in sorted({n for n in names if names.count(n) > 1})]
    found += [f"{where}: {one} is missing" for one in sorted(rule.needed - set(names))]
    found += [f"{where}: attribute {one}" for one in sorted(set(element.attrib) - rule.attributes)]
    if element.text and element.text.strip():
        found.append(f"{where}: text between the elements")
    known = [name for name in names if name in rule.children]
    if rule.is_ordered and known != [name for name in rule.children if name in known]:
        found.append(f"{where}: the order is {known}")
    for child, name in zip(element, names, strict=True):
        inner = rule.children.get(name)
        if inner is None:
            found.append(f"{where}: {name} is no child of it")
        elif isinstance(inner, Rule):
            found += _problems(child, inner, f"{where}/{name}")
        elif len(child) or child.attrib or not inner(child.text or ""):
            found.append(f"{where}/{name}: {child.text!r}")
    return found
