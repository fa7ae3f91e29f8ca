"""How much room there is where the data lies.

Runs in: agent.
"""

from __future__ import annotations

from pathlib import Path

import psutil


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
