"""The owner's pause, kept over a restart: a machine that was told to rest must not start by itself.

Runs in: agent. A small JSON file; the end of a timed pause is wall-clock time, since no other clock
goes on while the agent does not run.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from volunteer.errors import StorageFullError
from volunteer.files import replace_file
from volunteer.policy.signals import OwnerPause

log = logging.getLogger(__name__)


class _Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A program that does not know a field takes the file for a pause without an end."""

    until_unix_s: float | None
    """Seconds since 1970; None: until the owner resumes."""
    after_round: int | None = None
    """As in OwnerPause."""
    at_latest_unix_s: float | None = None
    """Seconds since 1970 of OwnerPause's instant."""
    ends_agent: bool = False
    """Whether the agent ends with the round that is finished."""


@dataclass(frozen=True, slots=True)
class KeptWord:
    """What the owner had said, on the agent's clock."""

    pause: OwnerPause | None = None
    """None: nothing that still holds."""
    ends_agent: bool = False
    """Whether the agent ends with the round that is finished."""


def keep_pause(
    file: Path, pause: OwnerPause | None, now_s: float, *, ends_agent: bool = False
) -> None:
    """Write `pause` to `file`, or remove the file; a full disk is logged and only that.

    Args:
        file: where it is kept.
        pause: None: there is no pause any more.
        now_s: the agent's clock, which the pause's instants are of.
        ends_agent: whether the agent ends with the round that is finished.
    """
    offset_s = time.time() - now_s
    try:
        if pause is None:
            file.unlink(missing_ok=True)
            return
        kept = _Kept(
            until_unix_s=_moved(pause.until_s, offset_s),
            after_round=pause.after_round,
            at_latest_unix_s=_moved(pause.at_latest_s, offset_s),
            ends_agent=ends_agent,
        )
        replace_file(file, msgspec.json.encode(kept))
    except (OSError, StorageFullError) as error:
        log.warning("the pause will not outlive a restart: %s", error)


def read_pause(file: Path, now_s: float) -> KeptWord:
    """Return what was kept; a pause that is over is none, nor is a stop whose time has come.

    A file that cannot be read counts as a pause: resting is the side to err on.
    """
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=_Kept)
    except FileNotFoundError:
        return KeptWord()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("%s is not readable, so this machine rests: %s", file, error)
        return KeptWord(OwnerPause())
    offset_s = now_s - time.time()
    until_s = _moved(kept.until_unix_s, offset_s)
    at_latest_s = _moved(kept.at_latest_unix_s, offset_s)
    # The agent was to have ended by now, and has: who starts another one wants it to contribute.
    has_stopped = kept.ends_agent and at_latest_s is not None and at_latest_s <= now_s
    if has_stopped or (until_s is not None and until_s <= now_s):
        return KeptWord()
    pause = OwnerPause(until_s=until_s, after_round=kept.after_round, at_latest_s=at_latest_s)
    return KeptWord(pause, kept.ends_agent)


def _moved(instant_s: float | None, offset_s: float) -> float | None:
    """Return an instant of one clock as one of another."""
    return None if instant_s is None else instant_s + offset_s
