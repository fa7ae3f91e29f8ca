"""The GPU: is there one, does its driver answer, and was PyTorch built for both.

Runs in: the command line. Pure, but for `read_cards` and `pip_command`.

PyTorch from PyPI is built for the newest CUDA. With an older driver it sees no GPU, and the CPU
trains without a word. Here that is said, with the one command that installs a build that fits.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from volunteer.config import Config
from volunteer.doctor.check import Check, Level
from volunteer.doctor.nvidia import NvidiaFacts
from volunteer.doctor.torch_facts import TorchFacts

TORCH_REQUIREMENT = "torch>=2.9,<2.14"
"""As in pyproject.toml; checked by a test."""
_INDEX = "https://download.pytorch.org/whl"
OLDEST_CUDA = 12
"""No build of TORCH_REQUIREMENT is for an older one."""
_OLDEST_CARD = (5, 0)
"""No build runs on an older NVIDIA card."""
_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
_DISPLAY_CLASS = "0x03"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """All that is known of this machine's GPUs."""

    cards: Sequence[str]
    """Makers of the graphics cards on the PCI bus; empty: none, or the system does not tell."""
    nvidia: NvidiaFacts | None
    """None: the driver failed, as `nvidia_problem` says."""
    nvidia_problem: str
    torch: TorchFacts | None
    """None: it could not be asked, as `torch_problem` says."""
    torch_problem: str
    pip: str
    """How to install into this program's environment."""


def gpu_checks(facts: GpuFacts, config: Config) -> list[Check]:
    """Return every check of the GPU."""
    checks = [_torch(facts), *_driver(facts), *_gpus(facts)]
    if facts.torch is not None and not facts.torch.problem:
        checks += [*_fit(facts, facts.torch), *_other_makers(facts, facts.torch)]
        checks.append(_device(facts.torch, config))
    checks += _wanted_gpus(facts, config)
    return checks


def _check(level: Level, name: str, value: str, meaning: str, fix: str = "") -> Check:
    return Check(area="gpu", name=name, level=level, value=value, meaning=meaning, fix=fix)


def _torch(facts: GpuFacts) -> Check:
    torch = facts.torch
    problem = facts.torch_problem if torch is None else torch.problem
    if torch is None or problem:
        return _check("wrong", "PyTorch", "-", f"it does not work: {problem}", _repair(facts))
    built = f"for CUDA {torch.cuda}" if torch.cuda else f"for ROCm {torch.hip}" if torch.hip else ""
    return _check("well", "PyTorch", torch.version, f"built {built or 'without a GPU maker'}")


def _repair(facts: GpuFacts) -> str:
    return f"{facts.pip} install --force-reinstall {shlex.quote(TORCH_REQUIREMENT)}"


def _build(facts: GpuFacts, build: str) -> str:
    """Return the command that installs another build of PyTorch."""
    return f"{_repair(facts)} --index-url {_INDEX}/{build}"


def build_for(cuda: tuple[int, int]) -> str:
    """Return which of PyTorch's builds a driver of that CUDA runs (within a major all run)."""
    if cuda >= (13, 0):
        return "cu130"
    return "cu128" if cuda >= (12, 8) else "cu126"


def _driver(facts: GpuFacts) -> list[Check]:
    name = "NVIDIA driver"
    if facts.nvidia is None:
        return [_check("wrong", name, "-", f"it fails: {facts.nvidia_problem}", _driver_fix(facts))]
    if facts.nvidia.has_driver:
        cuda = "{}.{}".format(*facts.nvidia.cuda)
        return [_check("well", name, facts.nvidia.driver, f"runs programs for CUDA up to {cuda}")]
    if "NVIDIA" in facts.cards:
        text = "an NVIDIA card is in this machine, and its driver is not installed"
        step = "install your system's NVIDIA driver (Ubuntu: sudo ubuntu-drivers install), reboot"
        return [_check("wrong", name, "none", text, step)]
    return []


def _driver_fix(facts: GpuFacts) -> str:
    problem = facts.nvidia_problem.lower()
    if "mismatch" in problem or "not answered" in problem:
        return "sudo reboot"
    return "sudo modprobe nvidia" if "not loaded" in problem else "nvidia-smi"


def _gpus(facts: GpuFacts) -> list[Check]:
    if facts.nvidia is None:
        return []
    if not facts.nvidia.gpus:
        others = [maker for maker in facts.cards if maker != "NVIDIA"]
        if facts.nvidia.has_driver:
            text = "the driver sees no card: in a container, it was not passed in"
            return [_check("wrong", "GPUs", "none", text, "docker run --gpus all ...")]
        if "NVIDIA" in facts.cards or others:
            return []
        return [_check("well", "GPUs", "none", "no graphics card: the CPU trains")]
    return [
        _check(
            "well",
            gpu.name,
            f"{gpu.free_bytes / 1e9:.1f} of {gpu.total_bytes / 1e9:.1f} GB free",
            f"id {gpu.uuid}" + (f", generation sm_{_sm(gpu.capability)}" if gpu.capability else ""),
        )
        for gpu in facts.nvidia.gpus
    ]


def _sm(capability: tuple[int, int]) -> str:
    return f"{capability[0]}{capability[1]}"


def _fit(facts: GpuFacts, torch: TorchFacts) -> list[Check]:
    """Compare PyTorch's build with the driver and each NVIDIA card."""
    nvidia = facts.nvidia
    if nvidia is None or not nvidia.gpus:
        return []
    name, driver_cuda = "PyTorch and driver", "{}.{}".format(*nvidia.cuda)
    if nvidia.cuda[0] < OLDEST_CUDA:
        text = f"the driver is too old: no PyTorch of today runs on CUDA {driver_cuda}"
        step = "update the NVIDIA driver (Ubuntu: sudo ubuntu-drivers install), reboot"
        return [_check("wrong", name, f"CUDA {driver_cuda}", text, step)]
    if not torch.cuda:
        fix = _build(facts, build_for(nvidia.cuda))
        text = "PyTorch is built for the CPU alone: the GPU is not used"
        return [_check("wrong", name, torch.version, text, fix)]
    if int(torch.cuda.partition(".")[0]) > nvidia.cuda[0]:
        text = f"PyTorch is built for CUDA {torch.cuda}, the driver runs {driver_cuda} at most"
        fix = _build(facts, build_for(nvidia.cuda))
        return [_check("wrong", name, f"{torch.cuda} > {driver_cuda}", text, fix)]
    if old := _too_old_cards(facts, nvidia, torch):
        return old
    if torch.device_problem or not any(d.kind == "cuda" for d in torch.devices):
        said = torch.device_problem or "it sees none (is CUDA_VISIBLE_DEVICES set?)"
        fix = "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm"
        return [_check("wrong", name, "no GPU", f"PyTorch cannot use the GPU: {said}", fix)]
    return [_check("well", name, f"{torch.cuda} and {driver_cuda}", "they fit")]


def _too_old_cards(facts: GpuFacts, nvidia: NvidiaFacts, torch: TorchFacts) -> list[Check]:
    known = [_parse_sm(text) for text in torch.architectures]
    oldest = min((sm for sm in known if sm is not None), default=None)
    checks = []
    for gpu in nvidia.gpus:
        if oldest is None or gpu.capability is None or gpu.capability >= oldest:
            continue
        text = f"this PyTorch has no code for a card of generation sm_{_sm(gpu.capability)}"
        is_hopeless = gpu.capability < _OLDEST_CARD or torch.cuda.startswith("12.6")
        fix = "allmende config set device cpu" if is_hopeless else _build(facts, "cu126")
        checks.append(_check("wrong", gpu.name, f"sm_{_sm(gpu.capability)}", text, fix))
    return checks


def _parse_sm(text: str) -> tuple[int, int] | None:
    """Return (9, 0) of `sm_90`; None where it is no NVIDIA generation."""
    digits = text.removeprefix("sm_").rstrip("af")
    if not text.startswith("sm_") or not digits.isdigit() or len(digits) < 2:
        return None
    return int(digits[:-1]), int(digits[-1])


def _other_makers(facts: GpuFacts, torch: TorchFacts) -> list[Check]:
    checks = []
    if "AMD" in facts.cards and not torch.hip:
        text = "this PyTorch is not built for AMD's cards: they are not used"
        checks.append(_check("note", "AMD card", "unused", text, _build(facts, "rocm6.4")))
    if "Intel" in facts.cards and not any(d.kind == "xpu" for d in torch.devices):
        text = "an Intel GPU is not used by this PyTorch; small ones are no faster than the CPU"
        checks.append(_check("note", "Intel card", "unused", text, _build(facts, "xpu")))
    return checks


def _device(torch: TorchFacts, config: Config) -> Check:
    """Say what would be trained on."""
    kind, _, number = config.device.partition(":")
    there = [device for device in torch.devices if device.kind == kind]
    if kind == "cpu" or (kind == "auto" and not torch.devices):
        why = "you have set `device` to cpu" if kind == "cpu" else "no GPU that PyTorch can use"
        return _check("well", "device", "CPU", why)
    if kind == "auto":
        return _check("well", "device", torch.devices[0].name, "it is trained on")
    if int(number or "0") >= len(there):
        text = f"`device` is {config.device} in your settings, and PyTorch sees no such device"
        return _check("wrong", "device", config.device, text, "allmende config unset device")
    return _check("well", "device", there[int(number or "0")].name, "it is trained on")


def _wanted_gpus(facts: GpuFacts, config: Config) -> list[Check]:
    if not config.gpus:
        return []
    here = {gpu.uuid for gpu in facts.nvidia.gpus} if facts.nvidia is not None else set()
    missing = [uuid for uuid in config.gpus if uuid not in here]
    if not missing:
        return [_check("well", "gpus", str(len(config.gpus)), "those that you have named are here")]
    text = f"`gpus` names what is not here: {', '.join(missing)}"
    return [_check("wrong", "gpus", str(len(missing)), text, "allmende config unset gpus")]


def read_cards(sys_dir: Path = Path("/sys")) -> tuple[str, ...]:
    """Return the makers of the graphics cards on the PCI bus."""
    makers = []
    for device in sorted((sys_dir / "bus" / "pci" / "devices").glob("*")):
        if _text(device / "class").startswith(_DISPLAY_CLASS):
            maker = _VENDORS.get(_text(device / "vendor"))
            makers += [maker] if maker else []
    return tuple(makers)


def _text(file: Path) -> str:
    try:
        return file.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def pip_command(prefix: str = sys.prefix) -> str:
    """Return how pip of this program's environment is run: by pipx where that has installed it."""
    parts = Path(prefix).parts
    if parts[-2:] == ("venvs", "allmende"):
        return "pipx runpip allmende"
    return f"{shlex.quote(str(Path(prefix) / 'bin' / 'python'))} -m pip"
