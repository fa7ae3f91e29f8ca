"""Lines of what happened when, which the benchmark's processes leave for run.py."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

BENCH_DIR = Path(os.environ.get("BENCH_DIR", "."))


def mark(what: str, **facts: object) -> None:
    """Write that `what` happened now, on the clock that all processes share."""
    line = json.dumps({"at": time.monotonic(), "what": what, **facts}) + "\n"
    descriptor = os.open(BENCH_DIR / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)
