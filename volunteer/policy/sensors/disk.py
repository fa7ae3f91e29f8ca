"""How much room there is where the data lies.

Runs in: agent.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own are


def read_free_bytes(folder: Path) -> int | None:
    """Return the bytes that this user may still write on the disk of `folder`.

    A folder that is not there yet counts as its nearest parent. None: cannot tell.
    """
    for place in (folder, *folder.parents):
        try:
            return int(psutil.disk_usage(str(place)).free)
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def read_tree_bytes(folder: Path) -> int:
    """Return what the files below `folder` take on the disk; what comes and goes may be missed.

    A file of several names, as weights that were imported, counts once.
    """
    taken = 0
    counted: set[int] = set()
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        taken += _taken_bytes(entry, counted)
        except OSError:  # it has just been deleted
            continue
    return taken


def _taken_bytes(entry: os.DirEntry[str], counted: set[int]) -> int:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return 0
    if status.st_nlink > 1:
        if status.st_ino in counted:
            return 0
        counted.add(status.st_ino)
    blocks: int | None = getattr(status, "st_blocks", None)
    return status.st_size if blocks is None else blocks * _BLOCK_BYTES
