"""What PyTorch is on this machine, asked in a process of its own.

Runs in: the command line.
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from volunteer.doctor.check import LookError

REPORT_COMMAND = (sys.executable, "-P", "-m", "volunteer.training.torch_report")
DEADLINE_S = 90.0
"""A first import from a slow disk takes half a minute."""
_MAX_BYTES = 1 << 20


class TorchDevice(msgspec.Struct, frozen=True, kw_only=True):
    """One device that PyTorch can use, beside the CPU."""

    kind: str
    """cuda (ROCm too), mps or xpu."""
    name: str
    capability: tuple[int, int] | None = None


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed."""

    problem: str = ""
    """Why it cannot be imported at all; all else is empty then."""
    version: str = ""
    cuda: str = ""
    """The CUDA that it was built with, as `13.0`; empty: without."""
    hip: str = ""
    """The ROCm that it was built with; empty: without."""
    architectures: tuple[str, ...] = ()
    """The NVIDIA generations that it has code for, as `sm_90`; also `gfx...` for AMD."""
    devices: tuple[TorchDevice, ...] = ()
    device_problem: str = ""
    """What it said when it was asked for its devices, or to use one."""


def read_torch(
    command: tuple[str, ...] = REPORT_COMMAND, deadline_s: float = DEADLINE_S
) -> TorchFacts:
    """Ask PyTorch what it is.

    Raises:
        LookError: the process could not be started, crashed, or has not answered in time.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline_s,
            check=False,
            cwd="/" if sys.platform != "win32" else None,
        )
    except subprocess.TimeoutExpired as error:
        raise LookError(f"PyTorch has not answered for {deadline_s:g} s") from error
    except OSError as error:
        raise LookError(f"PyTorch could not be asked: {error.strerror}") from error
    try:
        return msgspec.json.decode(done.stdout[:_MAX_BYTES], type=TorchFacts)
    except ValueError as error:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        last = lines[-1] if lines else f"exit status {done.returncode}"
        raise LookError(f"PyTorch crashed when it was asked: {last}") from error
