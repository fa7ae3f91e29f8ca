"""Which programs hold the memory that a trainer did not get.

Runs in: agent, in a thread: it looks at every process once, after something has failed.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

import psutil

from volunteer.policy.sensors.drm import find_cards, read_clients
from volunteer.policy.sensors.load import own_processes
from volunteer.policy.sensors.nvidia import NvidiaSource, has_library
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError
from volunteer.policy.veto import gb

MAX_NAMED = 3
MIN_FRACTION = 0.02
"""Of all main memory: who holds less is not named."""


def name_holders(device: str) -> tuple[str, ...]:
    """Return who else holds the memory of a device, the largest first, as `blender (6.1 GB)`.

    Args:
        device: as torch names it; empty: unknown, the trainer never got that far.
    """
    places = Places.from_environment(os.environ)
    if device == "cpu" or not (has_library() or find_cards(places)):
        return _ram_holders(own_processes())
    return (*_nvidia_holders(), *_drm_holders(places, own_processes()))[:MAX_NAMED]


def count_oom_kills() -> int:
    """Return how many processes the system has killed for want of memory since it started.

    0 where it does not count them.
    """
    try:
        text = Path("/proc/vmstat").read_text("ascii")
    except OSError:
        return 0
    counts = dict(line.split() for line in text.splitlines())
    return int(counts.get("oom_kill", "0"))


def _nvidia_holders() -> tuple[str, ...]:
    if not has_library():
        return ()
    source = NvidiaSource((), own_processes)
    try:
        return source.read().others
    except SensorError:  # the driver is away: it names nobody
        return ()
    finally:
        source.close()


def _drm_holders(places: Places, ours: frozenset[int]) -> tuple[str, ...]:
    """Return who holds memory of AMD's and Intel's GPUs; only this user's programs are told."""
    if sys.platform != "linux" or not find_cards(places):
        return ()
    held: Counter[str] = Counter()
    for process in psutil.process_iter(["name"]):
        if process.pid not in ours:
            clients = read_clients(places.proc_dir / str(process.pid) / "fdinfo")
            held[_name_of(process)] += sum(client.memory_bytes for client in clients)
    return tuple(f"{name} ({gb(size)})" for name, size in held.most_common(MAX_NAMED) if size)


def _ram_holders(ours: frozenset[int]) -> tuple[str, ...]:
    """Return who holds the most main memory, programs of one name together."""
    held: Counter[str] = Counter()
    for process in psutil.process_iter(["name", "memory_info"]):
        memory = process.info["memory_info"]
        if memory is not None and process.pid not in ours:
            # What is shared, like libraries, is in each one's size, but nobody holds it alone.
            held[_name_of(process)] += max(0, memory.rss - getattr(memory, "shared", 0))
    least_bytes = MIN_FRACTION * psutil.virtual_memory().total
    largest = held.most_common(MAX_NAMED)
    return tuple(f"{name} ({gb(size)})" for name, size in largest if size >= least_bytes)


def _name_of(process: psutil.Process) -> str:
    return str(process.info["name"] or f"process {process.pid}")
