"""What an exchange costs, seen from outside: CPU and memory of processes, bytes on the loopback.

Linux only. The benchmark runs in a network namespace of its own (run.py), so that whatever passes
its loopback interface is the exchange's: payload, protocol, and the headers of TCP and IP.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SAMPLE_EVERY_S = 0.25
LOOPBACK = "lo"
ROLES = {
    "trainer": "idle_trainer.py",
    "aggregator": "volunteer.training.aggregator",
    "agent": "idle_agent.py",
    "hivemind's daemon": "p2pd",
    "hivemind's Python": "",
}
"""A word in the command line of each kind of process; the first that fits."""


def with_children(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes and all that they have started."""
    family: dict[int, psutil.Process] = {}
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            family |= {p.pid: p for p in (process, *process.children(recursive=True))}
    return list(family.values())


def cpu_seconds(pids: Iterable[int]) -> dict[str, float]:
    """Return the user and system seconds that the processes and their children used, by role."""
    seconds = dict.fromkeys(ROLES, 0.0)
    for process in with_children(pids):
        with contextlib.suppress(psutil.NoSuchProcess):
            times, command = process.cpu_times(), " ".join(process.cmdline())
            role = next(role for role, word in ROLES.items() if word in command)
            seconds[role] += times.user + times.system
    return {role: total for role, total in seconds.items() if total}


def loopback_bytes() -> int:
    """Return what the namespace's loopback interface has carried."""
    return psutil.net_io_counters(pernic=True)[LOOPBACK].bytes_sent


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the memory of the processes, what they share counted once (PSS)."""
    total = 0
    for process in with_children(pids):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


@dataclass(slots=True)
class MemoryPeak:
    """The largest memory seen so far."""

    bytes: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)


@contextlib.contextmanager
def watching_memory(pids: Iterable[int]) -> Iterator[MemoryPeak]:
    """Sample memory while the block runs; it costs CPU, so nothing is timed meanwhile."""
    peak, family = MemoryPeak(), list(pids)

    def sample() -> None:
        while not peak._ended.wait(SAMPLE_EVERY_S):
            peak.bytes = max(peak.bytes, resident_bytes(family))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        peak._ended.set()
        thread.join()
