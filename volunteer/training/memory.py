"""What the device's memory has free, and what of it this process has needed at most.

Runs in: trainer.
"""

from __future__ import annotations

import sys

import psutil
import torch

_KIB = 1024


def free_bytes(device: torch.device) -> int | None:
    """Return what can still be taken of a device's memory; of the machine's, on a CPU.

    None where torch cannot tell.
    """
    if device.type == "cpu":
        return int(psutil.virtual_memory().available)
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type == "mps":
        taken = torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory()
        return int(torch.mps.recommended_max_memory()) - taken
    return None


def reset_peak(device: torch.device) -> None:
    """Count `peak_bytes` from here; where only the system counts, it counts from the start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "xpu":
        torch.xpu.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Return what this process has held at most: of the device's memory; of any, on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "xpu":
        return int(torch.xpu.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * _KIB
