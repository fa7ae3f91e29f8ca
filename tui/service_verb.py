"""`allmende service`: have the system start the agent at login.

Runs in: the command line.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tui.arguments import AsJson
from volunteer.locations import Locations

if TYPE_CHECKING:
    from volunteer.service.service import Service, ServiceStatus

service_app = typer.Typer(
    help="Start at login: a systemd user unit, a LaunchAgent, a logon task.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@service_app.command()
def install(
    is_now: Annotated[bool, typer.Option("--now", help="Start it at once as well.")] = False,
    is_shown: Annotated[
        bool, typer.Option("--print", help="Only print what would be installed.")
    ] = False,
) -> None:
    """Have the agent started at each login, with the settings of `allmende config`."""
    from volunteer.config import load_config
    from volunteer.service.service import ServiceError

    service = _service()
    if is_shown:
        _write(service.definition().rstrip("\n"))
        return
    locations = _locations()
    # What the agent would refuse at each login is said now.
    load_config(locations.config_file, {})
    locations.prepare()
    try:
        service.install(is_now=is_now)
    except OSError as error:
        raise ServiceError(f"{error.filename} cannot be written: {error.strerror}") from error
    _write(*_told(service.status()))
    _write("  see it: allmende service status    undo it: allmende service uninstall")


@service_app.command()
def uninstall() -> None:
    """Start it no more at login, end the agent that was started so, and leave nothing of it."""
    was_there = _service().uninstall()
    _write("It no longer starts at login." if was_there else "It did not start at login.")
    _write("  contribute when you want: allmende start")


@service_app.command("status")
def show_status(as_json: AsJson = False) -> None:
    """Say whether the agent starts at login, and whether it runs by that."""
    status = _service().status()
    if as_json:
        _write(msgspec.json.encode(status).decode())
        return
    _write(*_told(status))


def _told(status: ServiceStatus) -> list[str]:
    """Return what is so, as lines."""
    if not status.is_installed:
        return ["It does not start at login: `allmende service install` changes that."]
    lines = [f"It starts at login: {status.kind} {status.name}."]
    if status.file:
        lines.append(f"  file      {status.file}")
    lines.append(f"  running   {'yes' if status.is_running else 'no'}")
    if status.is_before_login is not None:
        lines.append(f"  no login  {_linger(status.is_before_login)}")
    if not status.is_current:
        lines.append("  It is not what this program would install: `allmende service install`.")
    if status.problem:
        lines.append(f"  {status.problem}")
    return lines


def _linger(is_before_login: bool) -> str:
    if is_before_login:
        return "it starts with the machine, and goes on when you log out"
    return "it ends when you log out; `loginctl enable-linger` has it start with the machine"


def _service() -> Service:
    from volunteer.service.manager import find_program, find_service

    program = find_program(os.environ, sys.argv[0])
    return find_service(_locations(), os.environ, program=program)


def _locations() -> Locations:
    return Locations.from_environment(os.environ)


def _write(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
