"""What one check of the doctor found.

Runs in: the command line. Pure.
"""

from __future__ import annotations

import os
import shlex
import threading
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

import msgspec

from volunteer.errors import VolunteerError

Area = Literal["idle", "gpu", "network", "disk", "terminal", "clock"]
Level = Literal["well", "note", "wrong"]
DEADLINE_S = 3.0
"""For one look at something that may hang: a driver, a disk of the network, a peer."""
T = TypeVar("T")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `allmende doctor --json`: fields may be added, never renamed."""

    area: Area
    name: str
    level: Level
    """well; note: good to know, nothing has to be done; wrong: to be fixed (exit status 1)."""
    value: str
    """What was seen."""
    meaning: str
    fix: str = ""
    """The one command, or step, that helps; empty where nothing is to be done."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`allmende doctor --json`: fields may be added, never renamed."""

    is_well: bool
    """Whether nothing is wrong: the exit status is 0."""
    checks: tuple[Check, ...]


def make_report(checks: Iterable[Check]) -> Report:
    """Return all checks with what follows from them."""
    all_checks = tuple(checks)
    return Report(
        is_well=all(check.level != "wrong" for check in all_checks),
        checks=all_checks,
    )


class LookError(VolunteerError):
    """A look at the machine failed; the message says why."""


def within(look: Callable[[], T], deadline_s: float = DEADLINE_S) -> T:
    """Return what `look` returns, in a thread that is left behind if it hangs.

    Raises:
        LookError: it failed with OSError, or has not answered in time.
    """
    told: list[T] = []
    failed: list[str] = []

    def run() -> None:
        try:
            told.append(look())
        except OSError as error:
            failed.append(error.strerror or str(error))
        except VolunteerError as error:
            failed.append(str(error))

    # A daemon: one that hangs must not keep the program from ending.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline_s)
    if told:
        return told[0]
    raise LookError(failed[0] if failed else f"it has not answered for {deadline_s:g} s")


def quoted(path: os.PathLike[str]) -> str:
    """Return a path as the shell takes it."""
    return shlex.quote(os.fspath(path))
