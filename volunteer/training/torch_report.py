"""`python -m volunteer.training.torch_report`: what PyTorch is here, as one line of JSON.

Runs in: a process of its own, for the doctor. To import torch takes seconds and, where a driver is
broken, hangs or crashes: whoever asks waits no longer than it wants to.
"""

from __future__ import annotations

import sys

import msgspec

from volunteer.doctor.torch_facts import TorchDevice, TorchFacts


def read_facts() -> TorchFacts:
    """Import torch and ask it."""
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of it that does not load
        return TorchFacts(problem=f"{type(error).__name__}: {error}")
    devices, problem = [], ""
    try:
        for number in range(torch.cuda.device_count()):
            name = torch.cuda.get_device_name(number)
            capability = torch.cuda.get_device_capability(number)
            devices.append(TorchDevice(kind="cuda", name=name, capability=capability))
        if torch.backends.mps.is_available():
            devices.append(TorchDevice(kind="mps", name="Apple GPU (Metal)"))
        xpus = [torch.xpu.get_device_name(number) for number in range(torch.xpu.device_count())]
        devices += [TorchDevice(kind="xpu", name=name) for name in xpus]
        if torch.cuda.device_count():
            torch.zeros(1, device="cuda").add_(1).item()  # a device that is seen may still be dead
    except (RuntimeError, AssertionError) as error:
        problem = str(error).partition("\n")[0]
    return TorchFacts(
        version=str(torch.__version__),
        cuda=torch.version.cuda or "",
        hip=getattr(torch.version, "hip", None) or "",
        architectures=tuple(torch.cuda.get_arch_list()),
        devices=tuple(devices),
        device_problem=problem,
    )


def main() -> None:
    """Print it."""
    sys.stdout.write(msgspec.json.encode(read_facts()).decode() + "\n")


if __name__ == "__main__":
    main()
