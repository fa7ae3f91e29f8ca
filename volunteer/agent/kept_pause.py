"""The owner's pause, kept over a restart: a machine that was told to rest must not start by itself.

Runs in: agent. A small JSON file; the end of a timed pause is wall-clock time, since no other clock
goes on while the agent does not run.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import msgspec

from volunteer.errors import StorageFullError
from volunteer.files import replace_file
from volunteer.policy.signals import OwnerPause

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    until_unix_s: float | None
    """Seconds since 1970; None: until the owner resumes."""


def keep_pause(file: Path, pause: OwnerPause | None, now_s: float) -> None:
    """Write `pause` to `file`, or remove the file; a full disk is logged and only that.

    Args:
        file: where it is kept.
        pause: None: there is no pause any more.
        now_s: the agent's clock, which `pause.until_s` is of.
    """
    try:
        if pause is None:
            file.unlink(missing_ok=True)
            return
        left_s = None if pause.until_s is None else pause.until_s - now_s
        until_unix_s = None if left_s is None else time.time() + left_s
        replace_file(file, msgspec.json.encode(_Kept(until_unix_s=until_unix_s)))
    except (OSError, StorageFullError) as error:
        log.warning("the pause will not outlive a restart: %s", error)


def read_pause(file: Path, now_s: float) -> OwnerPause | None:
    """Return the pause that was kept, on the agent's clock; None if there is none or it is over.

    A file that cannot be read counts as a pause: resting is the side to err on.
    """
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s is not readable, so this machine rests: %s", file, error)
        return OwnerPause()
    if kept.until_unix_s is None:
        return OwnerPause()
    left_s = kept.until_unix_s - time.time()
    return OwnerPause(until_s=now_s + left_s) if left_s > 0 else None
