"""Remove what `allmende service install` has left of this user: python remove_services.py.

For install.sh --uninstall: a service whose program is gone would fail at each login. It needs only
the standard library, since it must also work when the installed program is broken; a test holds it
against volunteer/service. Prints a line for each service that it removes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

MARK = "`allmende service install`"
LABEL_PREFIX = "org.allmende."
DEADLINE_S = 90.0


def call(*argv: str) -> None:
    """Run one of the system's programs, if it is here; that it fails need not matter."""
    try:
        subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return  # there is no manager: nothing of it runs


def own_units(environ: Mapping[str, str], home: Path) -> Iterator[Path]:
    """Yield the units of systemd that we wrote."""
    config = environ.get("XDG_CONFIG_HOME", "")
    base = Path(config) if os.path.isabs(config) else home / ".config"
    for file in sorted((base / "systemd" / "user").glob("allmende*.service")):
        if MARK in file.read_text("utf-8", errors="replace").partition("\n")[0]:
            yield file


def remove_unit(file: Path) -> None:
    """End a unit and remove it, and the folders that nobody else uses."""
    call("systemctl", "--user", "disable", "--now", file.name)
    wanted = file.parent / "default.target.wants" / file.name
    wanted.unlink(missing_ok=True)
    file.unlink()
    call("systemctl", "--user", "daemon-reload")
    for folder in (wanted.parent, file.parent, file.parent.parent):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return  # others use it


def remove_agent(file: Path) -> None:
    """End a LaunchAgent and remove it."""
    call("launchctl", "bootout", f"gui/{os.getuid()}/{file.stem}")
    file.unlink()


def main() -> int:
    """Remove all; exit 1 where a file could not be removed."""
    home = Path.home()
    agents = sorted((home / "Library" / "LaunchAgents").glob(f"{LABEL_PREFIX}*.plist"))
    try:
        for file in own_units(os.environ, home):
            remove_unit(file)
            print(f"It no longer starts at login: {file} is removed.")
        for file in agents:
            remove_agent(file)
            print(f"It no longer starts at login: {file} is removed.")
    except OSError as error:
        print(f"{error.filename} could not be removed: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
