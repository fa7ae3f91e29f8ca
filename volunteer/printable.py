"""Text of strangers as a terminal may see it: a model's folder, a RunSpec, a file's name.

Runs in: the command line, export, import. Pure.
"""

from __future__ import annotations

from typing import Final

MAX_CHARS: Final = 4000


def printable(text: str) -> str:
    r"""Return `text` with what would steer a terminal written out (`\x1b`), and not too long.

    Lines stay lines.
    """
    cut = text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}..."
    return "".join(c if c.isprintable() or c == "\n" else _written_out(c) for c in cut)


def _written_out(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")
