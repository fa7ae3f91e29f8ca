"""How a process that does the work of one verb says what it cannot do.

Runs in: export, import. No torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

from p2p.errors import P2PError
from volunteer.errors import VolunteerError
from volunteer.printable import printable


def tell_failure(error: VolunteerError | P2PError | OSError, folder: Path) -> int:
    """Write the reason to stderr, and what helps; return the exit status.

    Args:
        error: what ended it; its words may be of a stranger.
        folder: what was read or written, where the system names no file.
    """
    if isinstance(error, OSError):
        message, hint, exit_code = f"{error.filename or folder}: {error.strerror or error}", "", 1
    else:
        message = str(error)
        hint, exit_code = getattr(error, "hint", ""), getattr(error, "exit_code", 1)
    told = f"allmende: {message}\n" + (f"  hint: {hint}\n" if hint else "")
    sys.stderr.write(printable(told))
    return exit_code
