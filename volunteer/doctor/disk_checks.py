"""The disk: room, whether it can be written to and how fast, and who else can read it.

Runs in: the command line. One file of 1 MiB is written and removed again; nothing else changes.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from volunteer.config import Config
from volunteer.doctor.check import Check, Level, LookError, quoted, within
from volunteer.doctor.facts import AgentFacts
from volunteer.local_data import SET_PRIVATE_DATA
from volunteer.locations import Locations
from volunteer.policy.sensors.disk import read_free_bytes

PROBE_BYTES = 1 << 20
SLOW_S = 1.0
"""To write so much and be sure of it; a laptop's disk takes a fiftieth."""
_ENOUGH_BYTES = 1 << 30
"""Left free, no desktop stumbles yet."""
_MAX_FILES = 200_000
"""That are counted; so many take some seconds."""


def disk_checks(
    config: Config, locations: Locations, agent: AgentFacts | None = None
) -> list[Check]:
    """Return every check of the disk; `agent` says what of its run's data is left out."""
    checks = [_contained("room", lambda: _room(config, locations))]
    if agent is not None and agent.data_note:
        level: Level = "wrong" if config.private_data else "note"
        checks.append(_check(level, "private data", "-", agent.data_note, SET_PRIVATE_DATA))
    if not locations.data_dir.exists():
        text = "nothing is stored yet; the folder is made at the first start"
        return [*checks, _check("well", "data", str(locations.data_dir), text)]
    return [
        *checks,
        _contained("writing", lambda: _writing(locations.data_dir)),
        _contained("privacy", lambda: _privacy(locations)),
        _contained("used", lambda: _used(locations)),
    ]


def _check(level: Level, name: str, value: str, meaning: str, fix: str = "") -> Check:
    return Check(area="disk", name=name, level=level, value=value, meaning=meaning, fix=fix)


def _contained(name: str, look: Callable[[], Check]) -> Check:
    """Return what `look` found, or that it found nothing."""
    try:
        return within(look)
    except LookError as error:
        return _check("wrong", name, "-", f"the disk cannot be looked at: {error}", "df -h")


def _room(config: Config, locations: Locations) -> Check:
    free_bytes, least_bytes = read_free_bytes(locations.data_dir), config.disk_min_free_bytes
    if free_bytes is None:
        text = "how much room is left cannot be told, so it does not contribute"
        return _check("wrong", "room", "-", text, f"df -h {quoted(locations.data_dir)}")
    value = f"{free_bytes / 1e9:.1f} GB free"
    if free_bytes < least_bytes:
        text = f"less than the {least_bytes / 1e9:.1f} GB that are always left free: it pauses"
        return _check("wrong", "room", value, text, _room_fix(free_bytes))
    text = f"where the data lies; below {least_bytes / 1e9:.1f} GB it pauses"
    return _check("well", "room", value, text)


def _room_fix(free_bytes: int) -> str:
    if free_bytes < 2 * _ENOUGH_BYTES:
        return "free some space (`allmende doctor disk` then says whether it suffices)"
    return f"allmende config set disk_min_free_bytes {_ENOUGH_BYTES}"


def _writing(folder: Path) -> Check:
    started_s = time.monotonic()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"nothing can be kept there: {error.strerror}"
        return _check("wrong", "writing", str(folder), text, f"ls -ld {quoted(folder)}")
    took_s = time.monotonic() - started_s
    if took_s > SLOW_S:
        text = "the disk is slow to keep what it is given; rounds may close late"
        return _check("note", "writing", f"{took_s:.1f} s a MiB", text)
    return _check("well", "writing", f"{1000 * took_s:.0f} ms a MiB", "what is written is kept")


def _privacy(locations: Locations) -> Check:
    file = locations.identity_file
    try:
        status = file.stat()
    except FileNotFoundError:
        return _check("well", "key", "none yet", "it is made at the first start")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        text = "others on this machine may read the key, and speak in your name"
        return _check("wrong", "key", f"mode {mode:o}", text, f"chmod 600 {quoted(file)}")
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        text = "the key belongs to another user: the agent cannot use it"
        return _check("wrong", "key", f"user {status.st_uid}", text, f"ls -l {quoted(file)}")
    return _check("well", "key", f"mode {mode:o}", "nobody else can read it; keep a copy safe")


def _used(locations: Locations) -> Check:
    parts = {"runs": locations.runs_dir, "logs": locations.log_dir}
    sizes = {name: _size_of(folder) for name, folder in parts.items()}
    value = ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items())
    return _check("well", "used", value, f"in {locations.data_dir}")


def _size_of(folder: Path) -> int:
    """Return the bytes of a folder's files, as far as they are many."""
    total = num_files = 0
    for place, _, names in os.walk(folder):
        for name in names:
            num_files += 1
            if num_files > _MAX_FILES:
                return total
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except FileNotFoundError:  # the agent has just removed it
                continue
    return total
