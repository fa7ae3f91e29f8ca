"""Which device trains, by what name, and in what precision.

Runs in: trainer.
"""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from volunteer.config import GPU_CONTEXT_BYTES
from volunteer.errors import ConfigError

_CPU = "cpu"
_PREFERENCE = ("cuda", "mps", "xpu", _CPU)
_NAME = re.compile(rf"(?P<kind>{'|'.join(_PREFERENCE)})(:(?P<number>[0-9]{{1,4}}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device, as the trainer uses it."""

    torch_device: torch.device
    name: str
    """As its maker calls it, for the owner to recognise."""
    autocast_dtype: torch.dtype | None
    """Of matrix products in the inner steps; None: fp32 throughout. Master weights are fp32."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which forward passes run."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.torch_device.type, dtype=self.autocast_dtype)


def choose_device(wanted: str) -> Device:
    """Return the device that the owner named, or the best one there is.

    Args:
        wanted: `auto` (the first of cuda, mps, xpu, cpu), a kind, or a kind and a number, `cuda:1`.

    Raises:
        ConfigError: no such kind of device, or none of it here.
    """
    if wanted == "auto":
        kind = next(kind for kind in _PREFERENCE if num_devices(kind) > 0)
        return _describe(kind, 0)
    match = _NAME.fullmatch(wanted)
    if match is None:
        raise ConfigError(
            f"device {wanted!r} is not known",
            hint="use auto, cpu, cuda, cuda:N, mps or xpu",
        )
    kind, number = match["kind"], int(match["number"] or "0")
    if number >= num_devices(kind):
        here = ", ".join(
            f"{kind}:{i}" for kind in _PREFERENCE[:-1] for i in range(num_devices(kind))
        )
        raise ConfigError(
            f"device {wanted!r} is not here; torch sees {here or 'no accelerator'}",
            hint="`--device auto` takes what there is; check the driver and torch's build",
        )
    return _describe(kind, number)


def num_devices(kind: str) -> int:
    """Return how many devices of a kind torch can use here."""
    counts: dict[str, Callable[[], int]] = {
        "cuda": torch.cuda.device_count,
        "mps": lambda: int(torch.backends.mps.is_available()),
        "xpu": torch.xpu.device_count,
        _CPU: lambda: 1,
    }
    return counts[kind]()


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error of torch means that the device's memory did not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # The CPU's allocator and MPS have no class of their own.
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator" in text or "out of memory" in text
    )


def release_cached_memory(device: torch.device) -> None:
    """Give memory that torch keeps for reuse back to the driver, after an out-of-memory error."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
    elif device.type == "xpu":
        torch.xpu.empty_cache()


def limit_memory(device: Device, max_bytes: int) -> None:
    """Have torch take no more of the device's memory than the owner allows.

    Beyond, a step runs out of memory, and is tried with smaller micro-batches. What the driver's
    context takes is not torch's to limit: GPU_CONTEXT_BYTES are left for it.

    Args:
        device: the one that trains; on a CPU nothing is limited.
        max_bytes: for the whole process.
    """
    kind = device.torch_device.type
    for_torch_bytes = max(0, max_bytes - GPU_CONTEXT_BYTES)
    if kind == "cuda":
        total_bytes = torch.cuda.get_device_properties(device.torch_device).total_memory
        fraction = min(1.0, for_torch_bytes / total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, device.torch_device)
    elif kind == "xpu":
        total_bytes = torch.xpu.get_device_properties(device.torch_device).total_memory
        fraction = min(1.0, for_torch_bytes / total_bytes)
        torch.xpu.set_per_process_memory_fraction(fraction, device.torch_device)
    elif kind == "mps":
        fraction = min(1.0, for_torch_bytes / torch.mps.recommended_max_memory())
        torch.mps.set_per_process_memory_fraction(fraction)


def _describe(kind: str, number: int) -> Device:
    if kind == "cuda":
        return Device(
            torch_device=torch.device("cuda", number),
            name=torch.cuda.get_device_name(number),
            # Emulated bfloat16 (before Ampere) is slower than fp32.
            autocast_dtype=torch.bfloat16
            if torch.cuda.get_device_capability(number) >= (8, 0)
            else None,
        )
    if kind == "xpu":
        return Device(
            torch_device=torch.device("xpu", number),
            name=torch.xpu.get_device_name(number),
            autocast_dtype=torch.bfloat16,
        )
    if kind == "mps":
        return Device(
            torch_device=torch.device("mps"), name="Apple GPU (Metal)", autocast_dtype=None
        )
    return Device(torch_device=torch.device(_CPU), name=_cpu_name(), autocast_dtype=None)


def _cpu_name() -> str:
    return f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
