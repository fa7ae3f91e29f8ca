"""Where and how results came to be: one line of JSON for each call of the lab.

Runs in: lab. Kept apart from the points (results.py), which are the same everywhere.
"""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import torch

from volunteer.files import telling_full_disk
from volunteer.program import program_name

RUNS_NAME = "runs.jsonl"
_GIB = 2**30


class LabRun(msgspec.Struct, frozen=True, kw_only=True):
    """One call of the lab."""

    command: str
    program: str
    started_utc: str
    ended_utc: str
    machine: str
    software: str
    threads: int
    cpu_s: float
    """Processor time of this call, all threads together."""
    peak_memory_bytes: int
    """The largest the process has been."""
    end: str
    """`finished`, or why not."""


def machine() -> str:
    """Return what computes here, in words."""
    memory_gib = psutil.virtual_memory().total / _GIB
    return (
        f"{psutil.cpu_count() or 1} cores of {platform.machine()}"
        f" ({torch.backends.cpu.get_cpu_capability()}), {memory_gib:.0f} GiB, on the CPU"
    )


def software() -> str:
    """Return the versions that the numbers may depend on."""
    return f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}"


def now_utc() -> str:
    """Return the time, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def describe_command(argv: Sequence[str]) -> str:
    """Return the command as one would type it."""
    return shlex.join(("allmende", "lab", *argv))


def note_run(
    folder: Path, *, command: str, started_utc: str, cpu_s: float, threads: int, end: str
) -> None:
    """Add a call to the folder's list.

    Raises:
        StorageFullError: it cannot be written.
    """
    run = LabRun(
        command=command,
        program=program_name(),
        started_utc=started_utc,
        ended_utc=now_utc(),
        machine=machine(),
        software=software(),
        threads=threads,
        cpu_s=round(cpu_s, 1),
        peak_memory_bytes=_peak_memory_bytes(),
        end=end,
    )
    file = folder / RUNS_NAME
    before = file.read_bytes() if file.exists() else b""
    separator = b"" if not before or before.endswith(b"\n") else b"\n"  # behind a line cut short
    with telling_full_disk(file), file.open("ab") as stream:
        stream.write(separator + msgspec.json.encode(run) + b"\n")


def read_runs(folder: Path) -> Iterator[LabRun]:
    """Yield the calls that the folder knows of; a line that a kill cut short is left out."""
    file = folder / RUNS_NAME
    lines = file.read_bytes().splitlines() if file.exists() else []
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=LabRun)
        except msgspec.MsgspecError:
            continue


def _peak_memory_bytes() -> int:
    if sys.platform == "win32":  # pragma: no cover
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # elsewhere in KiB
