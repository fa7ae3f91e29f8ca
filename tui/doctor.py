"""`allmende doctor`: each check with what was seen, what it means, and the one fixing command.

Runs in: the command line. It needs no agent; one that runs is asked what its own sensors say.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
import typer

from tui.arguments import AsJson
from tui.client import ControlClient
from tui.wording import clean
from volunteer.doctor.check import Area, Check, Report
from volunteer.doctor.facts import AgentFacts
from volunteer.errors import ConfigError, ControlError, NoAgentError
from volunteer.locations import Locations

DEADLINE_S = 20.0
"""The agent compares clocks with its peers first, for up to 10 s."""
MAX_WIDTH = 100
_MARKS = {"well": "ok", "note": "--", "wrong": "!!"}
_NAME_WIDTH = 14
_INDENT = " " * 5


def doctor(
    area: Annotated[
        Area | None,
        typer.Argument(metavar="[idle|gpu|network|disk|terminal|clock]", help="Default: all."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: what is seen, and the command that helps.

    Exit status 1 if something is to be fixed. Needs no agent, and changes nothing.
    """
    from volunteer.doctor.check import make_report
    from volunteer.doctor.examine import AREAS

    areas = (area,) if area is not None else AREAS
    sections = _sections(areas, Locations.from_environment(os.environ))
    if as_json:
        report = make_report(check for _, checks in sections for check in checks)
        _write(msgspec.json.encode(report).decode())
    else:
        report = make_report(_print_sections(sections))
        _write("", verdict(report))
    sys.exit(0 if report.is_well else 1)


def _sections(
    areas: Iterable[Area], locations: Locations
) -> Iterator[tuple[Area, Iterable[Check]]]:
    """Yield every area with its checks, which are made as they are asked for."""
    from volunteer.config import Config, load_config
    from volunteer.doctor.examine import Patient, examine

    areas = tuple(areas)
    faults: list[Check] = []
    try:
        config = load_config(locations.config_file, {})
    except ConfigError as error:
        config = Config()
        faults.append(_settings_fault(areas[0], error))
    agent, agent_faults = _ask_agent(locations, areas)
    faults += agent_faults
    patient = Patient(
        config=config,
        locations=locations,
        environ=os.environ,
        agent=agent,
        is_agent_silent=bool(agent_faults),
        pid=os.getpid(),
    )
    for area in areas:
        yield area, (*faults, *examine(area, patient))
        faults = []


def _settings_fault(area: Area, error: ConfigError) -> Check:
    first = str(error).splitlines()[0]
    return Check(
        area=area,
        name="settings",
        level="wrong",
        value="not valid",
        meaning=f"{first}; what follows goes by the defaults",
        fix="allmende config path",
    )


def _ask_agent(
    locations: Locations, areas: tuple[Area, ...]
) -> tuple[AgentFacts | None, list[Check]]:
    """Return what the agent says, if one runs; and what is wrong with it, if something is."""
    if not {"idle", "network", "disk", "clock"}.intersection(areas):
        return None, []
    try:
        with ControlClient(locations.control_socket, deadline_s=DEADLINE_S) as client:
            args = {"clocks": "clock" in areas}
            return client.request("doctor", AgentFacts, args), []
    except NoAgentError as error:
        if not isinstance(error.__cause__, PermissionError):
            return None, []
        problem, hint = str(error), error.hint
    except ControlError as error:
        problem, hint = str(error), error.hint
    fault = Check(
        area=areas[0],
        name="agent",
        level="wrong",
        value="no answer",
        meaning=clean(problem),
        fix=clean(hint),
    )
    return None, [fault]


def _print_sections(sections: Iterable[tuple[Area, Iterable[Check]]]) -> Iterator[Check]:
    """Print each area as soon as it is known."""
    is_first = True
    for area, checks in sections:
        _write(*([] if is_first else [""]), area)
        is_first = False
        for check in checks:
            _write(*check_lines(check, shutil.get_terminal_size().columns))
            yield check


def check_lines(check: Check, width: int) -> list[str]:
    """Return one check in words, folded into `width` columns."""
    value = clean(check.value)
    told = clean(check.meaning, limit=600)
    text = told if value in ("-", "") else f"{value}: {told}"
    head = f"  {_MARKS[check.level]} {clean(check.name).ljust(_NAME_WIDTH)} "
    lines = textwrap.wrap(
        text,
        max(20, min(width, MAX_WIDTH) - 1),
        initial_indent=head,
        subsequent_indent=" " * (5 + _NAME_WIDTH + 1),
    )
    # A command is never folded: it is there to be copied.
    how = "fix" if check.level == "wrong" else "try"
    return [*lines, *([f"{_INDENT}{how}: {clean(check.fix)}"] if check.fix else [])]


def verdict(report: Report) -> str:
    """Return the last line."""
    num_wrong = sum(check.level == "wrong" for check in report.checks)
    num_notes = sum(check.level == "note" for check in report.checks)
    notes = f" {num_notes} marked -- are good to know." if num_notes else ""
    if not num_wrong:
        return f"All is well.{notes}"
    things = "1 thing" if num_wrong == 1 else f"{num_wrong} things"
    return f"{things} to fix, marked !!, each with what helps.{notes}"


def _write(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
