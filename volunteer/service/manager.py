"""Which kind of service this system has, and what it is to run.

Runs in: the command line.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from volunteer.locations import Locations
from volunteer.service.launchd import LaunchdService
from volunteer.service.service import Runner, Service, ServiceError, run_program, service_command
from volunteer.service.systemd import SystemdService, units_dir
from volunteer.service.windows import WindowsService


def find_program(environ: Mapping[str, str], called_as: str) -> Path:
    """Return the command `allmende` by a name that stays when Python is upgraded.

    That is the one on PATH (pipx's link) if it is this very program, else the one that was called.

    Args:
        environ: for PATH.
        called_as: `sys.argv[0]`.

    Raises:
        ServiceError: it was not called by its command, and is not on PATH.
    """
    beside = Path(sys.executable).with_name("allmende.exe" if os.name == "nt" else "allmende")
    called = Path(os.path.abspath(called_as))
    own = called if called.stem == "allmende" and called.is_file() else beside
    on_path = shutil.which("allmende", path=environ.get("PATH"))
    if on_path is not None and own.exists() and os.path.samefile(on_path, own):
        return Path(os.path.abspath(on_path))
    if not own.is_file():
        raise ServiceError(
            "the command `allmende` is not installed, so nothing could start it at login",
            hint="install it: sh packaging/install.sh",
        )
    return own


def find_service(
    locations: Locations,
    environ: Mapping[str, str],
    *,
    program: Path,
    platform: str = sys.platform,
    home_dir: Path | None = None,
    run: Runner = run_program,
) -> Service:
    """Return this system's kind of service, for the volunteer whose folders `environ` names.

    Args:
        locations: of that volunteer.
        environ: the environment.
        program: what to start (`find_program`).
        platform: as `sys.platform`.
        home_dir: of the owner; default: as the system says.
        run: calls the system's programs.

    Raises:
        ServiceError: this system has none that is known here.
    """
    command = service_command(program, environ)
    home = home_dir or Path.home()
    if platform == "linux":
        folder = units_dir(environ, home)
        return SystemdService(command=command, units_dir=folder, user=getpass.getuser(), run=run)
    if platform == "darwin":
        return LaunchdService(
            command=command,
            agents_dir=home / "Library" / "LaunchAgents",
            log_file=locations.log_dir / "agent.log",
            user_id=os.getuid(),
            run=run,
        )
    if platform == "win32":
        user = "\\".join(filter(None, (environ.get("USERDOMAIN", ""), getpass.getuser())))
        can_run = hasattr(socket, "AF_UNIX")
        return WindowsService(command=command, user=user, can_run=can_run, run=run)
    raise ServiceError(
        f"how {platform} starts programs at login is not known here",
        hint="have it run `allmende start --foreground`",
    )
