"""What others do with NVIDIA GPUs, by the driver's own library (NVML).

Runs in: agent. Both compute and graphics processes are asked for: a game is only in the second
list. In containers and WSL NVML names processes of the host, or none: if none of ours is among
them although it holds memory, use cannot be told apart, and nothing is said while we train, or the
trainer would pause because of itself for ever (nvidia-docker#1483). Holding memory is no use: a
desktop always holds some.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from volunteer.policy.sensors.watcher import SensorError
from volunteer.policy.signals import GpuReading
from volunteer.policy.veto import gb

_T = TypeVar("_T")
_Nvml = Any
"""The module pynvml, which has no types."""
_Handle = Any
"""Its handle of one GPU."""
_LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")


def has_library() -> bool:
    """Return whether an NVIDIA driver is installed; costs nothing where there is none."""
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


@dataclass(frozen=True, slots=True)
class _Use:
    """One GPU at one moment."""

    others_fraction: float | None
    free_bytes: int | None
    celsius: float | None
    holders: dict[int, int]
    """Process id -> bytes, of others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Who holds the memory of one GPU."""

    uuid: str
    free_bytes: int | None
    """None: this GPU does not tell."""
    holders: dict[int, int]
    """Process id -> bytes, ours too; in containers those of the machine around, or none."""


class NvidiaSource:
    """The GPUs that are trained on, of one maker."""

    name = "NVIDIA"

    def __init__(
        self,
        uuids: Sequence[str],
        own_processes: Callable[[], frozenset[int]],
        library: _Nvml = None,
        *,
        is_trained_on: bool = True,
    ) -> None:
        """Ask NVML.

        Args:
            uuids: the GPUs to look at; empty: all.
            own_processes: ids of this program's processes.
            library: pynvml, or a test's twin; it is imported when first needed.
            is_trained_on: whether our trainer uses a GPU at all.
        """
        self._uuids = frozenset(uuids)
        self._own_processes = own_processes
        self._nvml = library
        self._is_trained_on = is_trained_on
        self._has_begun = False
        self._sampled_at: dict[str, int] = {}

    def read(self) -> GpuReading:
        """Return the worst of all GPUs in each respect.

        Raises:
            SensorError: the driver does not answer, or none of the GPUs wanted is here.
        """
        uses = self._ask(self._use)
        if not uses:
            raise SensorError("none of the GPUs in `gpus` is here (`nvidia-smi -L` lists them)")
        return _worst(uses)

    def _ask(self, question: Callable[[_Handle], _T]) -> list[_T]:
        """Ask about each GPU that is looked at.

        Raises:
            SensorError: the driver does not answer.
        """
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        nvml = self._nvml
        try:
            if not self._has_begun:
                nvml.nvmlInit()
                self._has_begun = True
            return [question(handle) for handle in self._handles()]
        except nvml.NVMLError as error:
            self.close()
            raise SensorError(_said(error)) from error

    def _memory(self, handle: _Handle) -> GpuMemory:
        return GpuMemory(
            uuid=_text(self._nvml.nvmlDeviceGetUUID(handle)),
            free_bytes=self._free_bytes(handle),
            holders=self._holders(handle),
        )

    def _free_bytes(self, handle: _Handle) -> int | None:
        free: int | None = self._try(lambda: int(self._nvml.nvmlDeviceGetMemoryInfo(handle).free))
        return free

    def memory(self) -> list[GpuMemory]:
        """Return who holds the memory of each GPU now.

        Raises:
            SensorError: the driver does not answer.
        """
        return self._ask(self._memory)

    def close(self) -> None:
        """Let go of the library, so that a driver that was replaced is found anew."""
        if self._has_begun:
            self._has_begun = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                return

    def _handles(self) -> list[Any]:
        nvml = self._nvml
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return [
            h for h in handles if not self._uuids or _text(nvml.nvmlDeviceGetUUID(h)) in self._uuids
        ]

    def _use(self, handle: _Handle) -> _Use:
        ours = self._own_processes()
        is_training = self._is_trained_on and len(ours) > 1
        holders = self._holders(handle)
        own_bytes = [size for pid, size in holders.items() if pid in ours]
        is_told_apart = bool(own_bytes) or not is_training
        free = self._free_bytes(handle)
        return _Use(
            others_fraction=self._others_fraction(handle, ours, bool(own_bytes))
            if is_told_apart
            else None,
            free_bytes=free + sum(own_bytes) if free is not None and is_told_apart else None,
            celsius=self._try(
                lambda: float(
                    self._nvml.nvmlDeviceGetTemperature(handle, self._nvml.NVML_TEMPERATURE_GPU)
                )
            ),
            holders={pid: size for pid, size in holders.items() if pid not in ours},
        )

    def _holders(self, handle: _Handle) -> dict[int, int]:
        nvml = self._nvml
        held: dict[int, int] = {}
        for ask in (
            nvml.nvmlDeviceGetComputeRunningProcesses,
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            for process in self._try(functools.partial(ask, handle)) or ():
                size = process.usedGpuMemory or 0  # None on Windows (nvitop#55)
                held[process.pid] = max(held.get(process.pid, 0), size)
        return held

    def _others_fraction(
        self,
        handle: _Handle,
        ours: frozenset[int],
        is_ours_there: bool,
    ) -> float | None:
        nvml = self._nvml
        if not is_ours_there:
            rates = self._try(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            return None if rates is None else rates / 100.0
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        since = self._sampled_at.get(uuid, 0)
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, since)
        except nvml.NVMLError_NotFound:
            return 0.0  # nobody has used it since
        except nvml.NVMLError:
            return None
        latest: dict[int, tuple[int, int]] = {}
        for sample in samples:
            self._sampled_at[uuid] = max(self._sampled_at.get(uuid, 0), sample.timeStamp)
            if sample.pid and sample.pid not in ours:
                latest[sample.pid] = max(
                    latest.get(sample.pid, (0, 0)), (sample.timeStamp, sample.smUtil)
                )
        return min(1.0, sum(used for _, used in latest.values()) / 100.0)

    def _try(self, question: Callable[[], Any]) -> Any:  # noqa: ANN401 - as the question
        """Return an answer; None where this GPU does not know the question."""
        nvml = self._nvml
        try:
            return question()
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_NotFound):
            return None


def _worst(uses: Sequence[_Use]) -> GpuReading:
    def known(values: list[Any]) -> list[Any]:
        return [value for value in values if value is not None]

    holders: dict[int, int] = {}
    for use in uses:
        for pid, size in use.holders.items():
            holders[pid] = holders.get(pid, 0) + size
    ranked = sorted(holders.items(), key=lambda item: -item[1])[:5]
    return GpuReading(
        others_fraction=max(known([use.others_fraction for use in uses]), default=None),
        free_bytes=min(known([use.free_bytes for use in uses]), default=None),
        temperature_celsius=max(known([use.celsius for use in uses]), default=None),
        others=tuple(described(pid, size) for pid, size in ranked),
    )


def described(pid: int, size_bytes: int) -> str:
    """Return a program that holds so much memory as `blender (3.1 GB)`; 0: nobody tells."""
    try:
        name = psutil.Process(pid).name()
    except psutil.Error:  # of another user, or of the machine around this container
        name = f"process {pid}"
    return f"{name} ({gb(size_bytes)})" if size_bytes else name


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _said(error: Exception) -> str:
    told = str(error)
    if "mismatch" in told.lower():
        return "the NVIDIA driver was updated: reboot"
    return told
