"""Where a Linux system keeps what the sensors read; a test has folders of its own.

Runs in: agent.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Files and folders of one machine."""

    x11_dir: Path = Path("/tmp/.X11-unix")  # noqa: S108 - where X servers listen
    lock_dir: Path = Path("/tmp")  # noqa: S108 - where they say who they are
    runtime_dir: Path = field(default_factory=lambda: Path(f"/run/user/{os.getuid()}"))
    home_dir: Path = field(default_factory=Path.home)
    dev_dir: Path = Path("/dev")
    proc_dir: Path = Path("/proc")
    sys_dir: Path = Path("/sys")
    run_dir: Path = Path("/run")
    root_dir: Path = Path("/")
    x_authority: Path | None = None
    """XAUTHORITY of the environment, if it is set."""
    session_bus: str = ""
    """Address of the session bus."""
    system_bus: str = "unix:path=/run/dbus/system_bus_socket"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Places:
        """Return this machine's; the environment only adds to what a daemon can find too."""
        runtime_dir = Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
        authority = environ.get("XAUTHORITY")
        bus = environ.get("DBUS_SESSION_BUS_ADDRESS") or f"unix:path={runtime_dir / 'bus'}"
        system = environ.get("DBUS_SYSTEM_BUS_ADDRESS")
        places = cls(
            runtime_dir=runtime_dir,
            x_authority=Path(authority) if authority else None,
            session_bus=bus,
        )
        if not system:
            return places
        return cls(
            runtime_dir=runtime_dir,
            x_authority=places.x_authority,
            session_bus=bus,
            system_bus=system,
        )
