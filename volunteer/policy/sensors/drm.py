"""What others do with AMD and Intel GPUs, as Linux's DRM drivers tell of each client.

Runs in: agent. /proc/PID/fdinfo of this user's processes: `drm-engine-*` in nanoseconds of use,
`drm-memory-vram` or `drm-total-*` of memory; other users' cannot be read. AMD's whole device says
how busy it is, and how full.

Kernel: Documentation/gpu/drm-usage-stats.rst.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from volunteer.policy.sensors.places import Places
from volunteer.policy.signals import GpuReading
from volunteer.policy.veto import gb

_VENDORS = ("0x1002", "0x8086")
_FIND_EVERY_S = 20.0
_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}


@dataclass(frozen=True, slots=True)
class Client:
    """One DRM client of a process."""

    client_id: str
    engine_ns: int
    """Use of its busiest engine."""
    memory_bytes: int


def find_cards(places: Places) -> list[Path]:
    """Return the device folders of AMD's and Intel's GPUs."""
    cards = sorted((places.sys_dir / "class" / "drm").glob("card[0-9]*"))
    devices = [card / "device" for card in cards if card.name[4:].isdigit()]
    return [device for device in devices if _text(device / "vendor") in _VENDORS]


class DrmSource:
    """All AMD and Intel GPUs of the machine."""

    name = "AMD/Intel GPU"

    def __init__(
        self,
        places: Places,
        own_processes: Callable[[], frozenset[int]],
        *,
        is_trained_on: bool = True,
    ) -> None:
        """Read /proc and /sys of `places`."""
        self._places = places
        self._own_processes = own_processes
        self._is_trained_on = is_trained_on
        self._with_drm: set[int] = set()
        self._found_at_s = -_FIND_EVERY_S
        self._before: dict[str, int] = {}
        self._read_at_s = 0.0

    def read(self) -> GpuReading:
        """Return what others use, and what is free."""
        ours = self._own_processes()
        now_s = time.monotonic()
        if now_s - self._found_at_s >= _FIND_EVERY_S:
            self._found_at_s = now_s
            self._with_drm = self._find_processes()
        passed_ns = 1e9 * (now_s - self._read_at_s)
        engine_ns: dict[str, int] = {}
        used: dict[int, float] = {}
        held: dict[int, int] = {}
        for pid in self._with_drm:
            for client in read_clients(self._places.proc_dir / str(pid) / "fdinfo"):
                engine_ns[client.client_id] = client.engine_ns
                before = self._before.get(client.client_id, client.engine_ns)
                used[pid] = used.get(pid, 0.0) + max(0, client.engine_ns - before) / passed_ns
                held[pid] = held.get(pid, 0) + client.memory_bytes
        self._before, self._read_at_s = engine_ns, now_s
        return self._reading(ours, used, held)

    def close(self) -> None:
        """Nothing is held open."""

    def _reading(
        self, ours: frozenset[int], used: dict[int, float], held: dict[int, int]
    ) -> GpuReading:
        others = sorted((pid for pid in used if pid not in ours), key=lambda pid: -used[pid])
        fraction = min(1.0, sum(used[pid] for pid in others))
        is_training = self._is_trained_on and len(ours) > 1
        own_bytes = sum(held[pid] for pid in held if pid in ours)
        free, busy = self._devices()
        if not is_training and busy is not None:
            fraction = max(fraction, busy)  # other users' programs are only seen so
        is_told_apart = own_bytes > 0 or not is_training
        return GpuReading(
            others_fraction=fraction,
            free_bytes=free + own_bytes if free is not None and is_told_apart else None,
            others=tuple(self._described(pid, held[pid]) for pid in others[:5] if used[pid] > 0.01),
        )

    def _devices(self) -> tuple[int | None, float | None]:
        """Return (bytes free on the fullest, how busy the busiest is), where the driver tells."""
        free, busy = [], []
        for device in find_cards(self._places):
            total, taken = (
                _number(device / "mem_info_vram_total"),
                _number(device / "mem_info_vram_used"),
            )
            if total is not None and taken is not None:
                free.append(total - taken)
            percent = _number(device / "gpu_busy_percent")
            if percent is not None:
                busy.append(percent / 100.0)
        return min(free, default=None), max(busy, default=None)

    def _find_processes(self) -> set[int]:
        found = set()
        for name in os.listdir(self._places.proc_dir):
            if name.isdigit() and self._has_drm(self._places.proc_dir / name / "fd"):
                found.add(int(name))
        return found

    def _has_drm(self, fd_dir: Path) -> bool:
        try:
            return any(
                os.readlink(fd_dir / fd).startswith("/dev/dri/") for fd in os.listdir(fd_dir)
            )
        except OSError:  # ended, or another user's
            return False

    def _described(self, pid: int, size: int) -> str:
        name = _text(self._places.proc_dir / str(pid) / "comm") or f"process {pid}"
        return f"{name} ({gb(size)})" if size else name


def read_clients(fdinfo_dir: Path) -> list[Client]:
    """Return the DRM clients of a process, each once although it may be open many times."""
    clients: dict[str, Client] = {}
    try:
        names = os.listdir(fdinfo_dir)
    except OSError:
        return []
    for name in names:
        fields = dict(
            line.split(":", 1) for line in _text(fdinfo_dir / name).splitlines() if ":" in line
        )
        if "drm-client-id" not in fields:
            continue
        client_id = f"{fields.get('drm-pdev', '').strip()} {fields['drm-client-id'].strip()}"
        engines = [_sized(v) for k, v in fields.items() if k.startswith("drm-engine-")]
        memory = max(
            (
                _sized(v)
                for k, v in fields.items()
                if k.startswith(("drm-memory-vram", "drm-total-vram", "drm-total-local"))
            ),
            default=0,
        )
        clients[client_id] = Client(client_id, max(engines, default=0), memory)
    return list(clients.values())


def _sized(text: str) -> int:
    number, _, unit = text.strip().partition(" ")
    return int(number) * _UNITS.get(unit, 1) if number.isdigit() else 0


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
