"""What the NVIDIA driver says of itself and its GPUs.

Runs in: the command line. Blocks where the driver does: see `check.within`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from volunteer.doctor.check import LookError
from volunteer.policy.sensors.nvidia import has_library


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaGpu:
    """One GPU."""

    name: str
    uuid: str
    """As `gpus` in the settings names it."""
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None
    """Compute capability, major and minor; None: the driver does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvidiaFacts:
    """The driver, and what it drives."""

    has_driver: bool
    """Whether the driver's library is installed."""
    driver: str = ""
    """Its version; empty without one."""
    cuda: tuple[int, int] = (0, 0)
    """The newest CUDA that it runs, major and minor."""
    gpus: tuple[NvidiaGpu, ...] = ()


def read_nvidia(library: Any = None) -> NvidiaFacts:  # noqa: ANN401 - pynvml has no types
    """Ask the driver.

    Args:
        library: pynvml, or a test's twin; None: it is imported where a driver is installed.

    Raises:
        LookError: the driver is there and does not answer as it should; the message is its own.
    """
    nvml = library
    if nvml is None:
        if not has_library():
            return NvidiaFacts(has_driver=False)
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
        try:
            return _read(nvml)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        raise LookError(str(error)) from error


def _read(nvml: Any) -> NvidiaFacts:  # noqa: ANN401 - as above
    version = int(nvml.nvmlSystemGetCudaDriverVersion())
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    return NvidiaFacts(
        has_driver=True,
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda=(version // 1000, version % 1000 // 10),
        gpus=tuple(_gpu(nvml, handle) for handle in handles),
    )


def _gpu(nvml: Any, handle: Any) -> NvidiaGpu:  # noqa: ANN401 - as above
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability: tuple[int, int] | None = (int(major), int(minor))
    except nvml.NVMLError_NotSupported:
        capability = None
    return NvidiaGpu(
        name=_text(nvml.nvmlDeviceGetName(handle)),
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        capability=capability,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
