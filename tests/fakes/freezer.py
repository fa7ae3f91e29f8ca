"""Processes that stand still and ignore SIGKILL, as in a driver that hangs: Linux's freezer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.agents import wait_until


class Freezer:
    """A group of the first version of cgroups: its frozen members cannot be killed."""

    def __init__(self, group: Path) -> None:
        self._group = group

    def freeze(self, pid: int) -> None:
        """Have a process stand still."""
        (self._group / "cgroup.procs").write_text(str(pid), "ascii")
        self._set("FROZEN")

    def thaw(self) -> None:
        """Let it go on, or end if it was killed meanwhile."""
        self._set("THAWED")

    def _set(self, state: str) -> None:
        file = self._group / "freezer.state"
        file.write_text(state, "ascii")
        wait_until(state, lambda: file.read_text("ascii").strip() == state, 10.0)


@contextlib.contextmanager
def freezing() -> Iterator[Freezer]:
    """Make a group; skip the test where it may not be made."""
    group = Path(f"/sys/fs/cgroup/freezer/almd-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"may not freeze a process: {error}")
    freezer = Freezer(group)
    try:
        yield freezer
    finally:
        freezer.thaw()
        wait_until("its member has ended", lambda: _is_removed(group), 20.0)


def _is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
