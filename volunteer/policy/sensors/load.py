"""What other programs do with the CPU, memory, and which of them run.

Runs in: agent. Ours are this process, its children and theirs. On Linux the few numbers needed are
read from /proc: psutil would read every process for them, twice a second.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from volunteer.config import Config
from volunteer.policy.sensors.places import Places

WINDOW = 4
"""Over so many readings the use is averaged: one compile of a file is no use."""
_NAMES_EVERY_S = 4.0
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class LoadReading:
    """What others do."""

    others_cpu_fraction: float | None
    """Of all cores, 0..1; None: not measured yet."""
    others_cpu: tuple[str, ...]
    """Who uses most; only told while it is more than the limit."""
    ram_available_bytes: int
    exclusive: tuple[str, ...]
    own_ram_bytes: int | None = None
    """Of all our processes; None: no limit is set."""


class LoadSource:
    """Other programs' use of this machine."""

    name = "load"

    def __init__(self, places: Places, config: Callable[[], Config]) -> None:
        """Measure.

        Args:
            places: where /proc is.
            config: the owner's wishes: which programs to look for, from which use on to name them.
        """
        self._proc_dir = places.proc_dir
        self._config = config
        self._samples: collections.deque[tuple[float, float]] = collections.deque(maxlen=WINDOW)
        self._by_process: dict[int, tuple[str, float]] = {}
        self._named_at_s = 0.0
        self._names: tuple[str, ...] = ()
        self._running: tuple[str, ...] = ()
        self._looked_at_s = 0.0

    def read(self) -> LoadReading:
        """Return what others have done during the last readings."""
        ours = own_processes(self._proc_dir)
        fraction = self._others_fraction(ours)
        return LoadReading(
            others_cpu_fraction=fraction,
            others_cpu=self._name_users(ours, fraction),
            ram_available_bytes=int(psutil.virtual_memory().available),
            exclusive=self._find_exclusive(ours),
            own_ram_bytes=sum(map(_held_bytes, ours)) if self._config().ram_max_bytes else None,
        )

    def close(self) -> None:
        """Nothing is held open."""

    def _others_fraction(self, ours: frozenset[int]) -> float | None:
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        # Guests' time is in `user` already, time stolen by other machines is nobody's here.
        busy_s = times.user + times.system + getattr(times, "nice", 0.0)
        busy_s += getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)
        own_s = sum(_cpu_seconds(pid) for pid in ours)
        before = self._samples[0] if self._samples else None
        self._samples.append((busy_s + idle_s, busy_s - own_s))
        if before is None or busy_s + idle_s <= before[0]:
            return None
        others_s = busy_s - own_s - before[1]
        return min(1.0, max(0.0, others_s / (busy_s + idle_s - before[0])))

    def _name_users(self, ours: frozenset[int], fraction: float | None) -> tuple[str, ...]:
        """Return who uses the CPU, of two looks at all processes some seconds apart."""
        now_s = time.monotonic()
        if fraction is None or fraction < self._config().others_cpu_limit:
            self._by_process, self._names = {}, ()
            return ()
        passed_s = now_s - self._named_at_s
        if passed_s < _NAMES_EVERY_S:
            return self._names
        seen: dict[int, tuple[str, float]] = {}
        for process in psutil.process_iter(["name", "cpu_times"]):
            times = process.info["cpu_times"]
            if times is not None and process.pid not in ours:
                seen[process.pid] = (process.info["name"] or "?", times.user + times.system)
        if self._by_process:
            self._names = _largest(self._by_process, seen, passed_s)
        self._by_process, self._named_at_s = seen, now_s
        return self._names

    def _find_exclusive(self, ours: frozenset[int]) -> tuple[str, ...]:
        now_s = time.monotonic()
        exclusive = {_plain(name): name for name in self._config().exclusive_programs}
        if not exclusive:
            self._running = ()
        if not exclusive or now_s - self._looked_at_s < _NAMES_EVERY_S:
            return self._running
        self._looked_at_s = now_s
        found = set()
        for process in psutil.process_iter(["name", "cmdline"]):
            called = [process.info["name"] or "", *(process.info["cmdline"] or [])[:1]]
            if process.pid not in ours:
                found |= {_plain(os.path.basename(name)) for name in called}
        self._running = tuple(exclusive[name] for name in sorted(found & set(exclusive)))
        return self._running


def own_processes(proc_dir: os.PathLike[str] | str = "/proc") -> frozenset[int]:
    """Return the ids of this process and of all that it started."""
    return family_of(os.getpid(), proc_dir)


def family_of(root: int, proc_dir: os.PathLike[str] | str = "/proc") -> frozenset[int]:
    """Return the ids of a process and of all that it started and is still there.

    Raises:
        psutil.NoSuchProcess: there is no such process, on systems that have no /proc.
    """
    if not os.path.exists(f"{proc_dir}/{root}/task/{root}/children"):
        return frozenset({root, *(p.pid for p in psutil.Process(root).children(recursive=True))})
    found, new = {root}, [root]
    while new:
        pid = new.pop()
        children = _children(f"{proc_dir}/{pid}/task") - found
        found |= children
        new += children
    return frozenset(found)


def _children(task_dir: str) -> set[int]:
    children: set[int] = set()
    try:
        for thread in os.listdir(task_dir):
            with open(f"{task_dir}/{thread}/children", encoding="ascii") as stream:
                children |= {int(pid) for pid in stream.read().split()}
    except OSError:  # it has just ended
        pass
    return children


def _cpu_seconds(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    # Ended children of ours: their time is in ours, and must not count as others'.
    return float(times.user + times.system + times.children_user + times.children_system)


def _held_bytes(pid: int) -> int:
    """Return the memory that a process holds for itself."""
    try:
        memory = psutil.Process(pid).memory_info()
    except psutil.Error:
        return 0
    # Pages of files (libraries, mapped states) are in the size, but the system takes them back.
    return max(0, int(memory.rss) - int(getattr(memory, "shared", 0)))


def _largest(
    before: dict[int, tuple[str, float]], after: dict[int, tuple[str, float]], passed_s: float
) -> tuple[str, ...]:
    used: collections.Counter[str] = collections.Counter()
    for pid, (name, seconds) in after.items():
        if pid in before and before[pid][0] == name:
            used[name] += int(1000 * (seconds - before[pid][1]))
    cores = os.cpu_count() or 1
    shown = [(name, ms / (1000.0 * passed_s * cores)) for name, ms in used.most_common(_SHOWN)]
    return tuple(f"{name} ({100 * part:.0f} %)" for name, part in shown if part >= 0.01)


def _plain(name: str) -> str:
    return name.lower().removesuffix(".exe")[:15]
