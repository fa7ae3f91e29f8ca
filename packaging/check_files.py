"""Refuse what must not be committed: large, secret or generated files, ragged ends of text.

Usage: python packaging/check_files.py FILE...
A pre-commit hook; tests/test_docs.py runs it on everything that is committed.
Prints one line a problem; exit status 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

MAX_FILE_BYTES = 5 * 1024 * 1024
_SECRET = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----|\b(?:ghp|gho|hf|AKIA)_?[A-Za-z0-9]{30,}")
_UNWANTED = re.compile(
    r"(^|/)(identity\.key|\.coverage[^/]*|coverage\.xml|[^/]+\.(log|ipynb|pkl|pyc|key|pem))$"
)


def find_problems(file: Path) -> list[str]:
    """Return a sentence for each reason not to commit `file`."""
    problems = []
    if _UNWANTED.search(file.as_posix()):
        problems.append("a key, log, notebook or generated file")
    size_bytes = file.stat().st_size
    if size_bytes > MAX_FILE_BYTES:
        return [*problems, f"{size_bytes} bytes, at most {MAX_FILE_BYTES}"]
    data = file.read_bytes()
    if _SECRET.search(data):
        problems.append("looks as if it holds a private key or an access token")
    is_text = b"\0" not in data
    if is_text and data and (not data.endswith(b"\n") or data.endswith(b"\n\n")):
        problems.append("does not end in exactly one newline")
    return problems


def main(names: list[str]) -> int:
    """Check the files and return the exit status."""
    found = [(name, problem) for name in names for problem in find_problems(Path(name))]
    for name, problem in found:
        print(f"{name}: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
