"""PyTorch's build against driver and cards: what is said, and the one command that helps."""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from volunteer.config import Config
from volunteer.doctor.check import Check, LookError
from volunteer.doctor.gpu_checks import (
    TORCH_REQUIREMENT,
    GpuFacts,
    build_for,
    gpu_checks,
    pip_command,
    read_cards,
)
from volunteer.doctor.nvidia import NvidiaFacts, NvidiaGpu, read_nvidia
from volunteer.doctor.torch_facts import TorchDevice, TorchFacts, read_torch

ROOT = Path(__file__).parents[3]
UUID = "GPU-8a5c0d3e-0000-1111-2222-333344445555"
CARD = NvidiaGpu(
    name="NVIDIA GeForce RTX 4090",
    uuid=UUID,
    total_bytes=24_000_000_000,
    free_bytes=23_000_000_000,
    capability=(8, 9),
)
NVIDIA = NvidiaFacts(has_driver=True, driver="580.65", cuda=(13, 0), gpus=(CARD,))
NO_NVIDIA = NvidiaFacts(has_driver=False)
TORCH = TorchFacts(
    version="2.13.0",
    cuda="13.0",
    architectures=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120a", "compute_120"),
    devices=(TorchDevice(kind="cuda", name=CARD.name, capability=(8, 9)),),
)
CPU_TORCH = TorchFacts(version="2.13.0+cpu")
WELL = GpuFacts(
    cards=("NVIDIA",),
    nvidia=NVIDIA,
    nvidia_problem="",
    torch=TORCH,
    torch_problem="",
    pip="pipx runpip allmende",
)
INSTALL = f"pipx runpip allmende install --force-reinstall '{TORCH_REQUIREMENT}'"


def wrong(facts: GpuFacts, config: Config | None = None) -> list[Check]:
    return [check for check in gpu_checks(facts, config or Config()) if check.level == "wrong"]


def card(capability: tuple[int, int]) -> NvidiaFacts:
    return dataclasses.replace(NVIDIA, gpus=(dataclasses.replace(CARD, capability=capability),))


def test_a_machine_where_all_fits_is_well_and_says_what_is_trained_on() -> None:
    checks = gpu_checks(WELL, Config(gpus=(UUID,)))
    assert {check.level for check in checks} == {"well"}
    assert [c.value for c in checks if c.name == "device"] == [CARD.name]
    assert any(UUID in check.meaning and "sm_89" in check.meaning for check in checks)


def test_a_machine_without_a_gpu_is_well() -> None:
    facts = dataclasses.replace(WELL, cards=(), nvidia=NO_NVIDIA, torch=CPU_TORCH)
    checks = gpu_checks(facts, Config())
    assert {check.level for check in checks} == {"well"}
    assert [(c.name, c.value) for c in checks[1:]] == [("GPUs", "none"), ("device", "CPU")]


CASES = {
    "a CPU build": (
        {"torch": CPU_TORCH},
        "built for the CPU alone",
        f"{INSTALL} --index-url https://download.pytorch.org/whl/cu130",
    ),
    "a CPU build, an older driver": (
        {"torch": CPU_TORCH, "nvidia": dataclasses.replace(NVIDIA, cuda=(12, 4))},
        "built for the CPU alone",
        f"{INSTALL} --index-url https://download.pytorch.org/whl/cu126",
    ),
    "a driver older than the build": (
        {"nvidia": dataclasses.replace(NVIDIA, cuda=(12, 8))},
        "built for CUDA 13.0, the driver runs 12.8 at most",
        f"{INSTALL} --index-url https://download.pytorch.org/whl/cu128",
    ),
    "a driver older than every build": (
        {"nvidia": dataclasses.replace(NVIDIA, cuda=(11, 4))},
        "the driver is too old",
        "update the NVIDIA driver (Ubuntu: sudo ubuntu-drivers install), reboot",
    ),
    "a card older than the build": (
        {"nvidia": card((6, 1))},
        "no code for a card of generation sm_61",
        f"{INSTALL} --index-url https://download.pytorch.org/whl/cu126",
    ),
    "a card older than every build": (
        {"nvidia": card((3, 5))},
        "sm_35",
        "allmende config set device cpu",
    ),
    "a GPU that torch cannot use": (
        {"torch": TorchFacts(version="2.13.0", cuda="13.0", device_problem="CUDA unknown error")},
        "CUDA unknown error",
        "sudo modprobe -r nvidia_uvm && sudo modprobe nvidia_uvm",
    ),
    "torch broken": (
        {"torch": TorchFacts(problem="OSError: libtorch.so")},
        "libtorch.so",
        INSTALL,
    ),
    "torch hangs": (
        {"torch": None, "torch_problem": "PyTorch has not answered for 90 s"},
        "not answered",
        INSTALL,
    ),
    "driver updated": (
        {"nvidia": None, "nvidia_problem": "Driver/library version mismatch"},
        "mismatch",
        "sudo reboot",
    ),
    "driver not loaded": (
        {"nvidia": None, "nvidia_problem": "Driver Not Loaded"},
        "Driver Not Loaded",
        "sudo modprobe nvidia",
    ),
    "no driver": (
        {"nvidia": NO_NVIDIA, "torch": CPU_TORCH},
        "its driver is not installed",
        "install your system's NVIDIA driver (Ubuntu: sudo ubuntu-drivers install), reboot",
    ),
    "no card for the driver": (
        {"nvidia": dataclasses.replace(NVIDIA, gpus=()), "torch": CPU_TORCH},
        "the driver sees no card",
        "docker run --gpus all ...",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_said_once_with_the_one_command(case: str) -> None:
    changes, meaning, fix = CASES[case]
    (check,) = wrong(dataclasses.replace(WELL, **changes))  # type: ignore[arg-type]
    assert meaning in check.meaning
    assert check.fix == fix


def test_a_device_or_gpu_that_is_not_here_is_wrong() -> None:
    (check,) = wrong(WELL, Config(device="cuda:1"))
    assert (check.value, check.fix) == ("cuda:1", "allmende config unset device")
    assert not wrong(WELL, Config(device="cuda:0"))
    (check,) = wrong(WELL, Config(gpus=("GPU-another",)))
    assert check.fix == "allmende config unset gpus"
    assert "GPU-another" in check.meaning


def test_cards_of_other_makers_are_a_note_with_the_build_for_them() -> None:
    facts = dataclasses.replace(WELL, cards=("AMD", "Intel"), nvidia=NO_NVIDIA, torch=CPU_TORCH)
    notes = [check for check in gpu_checks(facts, Config()) if check.level == "note"]
    assert [check.fix.rpartition("/")[2] for check in notes] == ["rocm6.4", "xpu"]
    assert not wrong(facts)
    rocm = TorchFacts(
        version="2.13.0", hip="6.4", devices=(TorchDevice(kind="cuda", name="Radeon"),)
    )
    facts = dataclasses.replace(facts, cards=("AMD",), torch=rocm)
    assert {check.level for check in gpu_checks(facts, Config())} == {"well"}


def test_the_build_is_one_that_the_driver_runs() -> None:
    assert [build_for(cuda) for cuda in ((12, 0), (12, 7), (12, 8), (13, 0), (14, 1))] == [
        "cu126", "cu126", "cu128", "cu130", "cu130",
    ]  # fmt: skip


def test_the_requirement_is_the_package_s() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert TORCH_REQUIREMENT in project["project"]["dependencies"]


def test_pip_is_run_as_it_was_installed() -> None:
    assert pip_command("/home/a/.local/share/pipx/venvs/allmende") == "pipx runpip allmende"
    assert pip_command("/home/a b/env") == "'/home/a b/env/bin/python' -m pip"


def test_cards_are_found_on_the_bus(tmp_path: Path) -> None:
    for number, (kind, vendor) in enumerate(
        (("0x030000", "0x10de"), ("0x020000", "0x8086"), ("0x038000", "0x1002"))
    ):
        device = tmp_path / "bus" / "pci" / "devices" / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "class").write_text(f"{kind}\n")
        (device / "vendor").write_text(f"{vendor}\n")
    assert read_cards(tmp_path) == ("NVIDIA", "AMD")


class NVMLError(Exception):
    pass


class NVMLErrorNotSupported(NVMLError):
    pass


def nvml(problem: str = "") -> SimpleNamespace:
    """A twin of pynvml with one card."""

    def init() -> None:
        if problem:
            raise NVMLError(problem)

    def capability(handle: int) -> tuple[int, int]:
        raise NVMLErrorNotSupported

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVMLError_NotSupported=NVMLErrorNotSupported,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetCudaDriverVersion=lambda: 12080,
        nvmlSystemGetDriverVersion=lambda: b"570.1",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=8 * 10**9, free=10**9),
        nvmlDeviceGetCudaComputeCapability=capability,
        nvmlDeviceGetName=lambda handle: b"Card",
        nvmlDeviceGetUUID=lambda handle: UUID.encode(),
    )


def test_the_driver_is_asked_for_all_of_it_and_its_failure_is_passed_on() -> None:
    facts = read_nvidia(nvml())
    assert (facts.driver, facts.cuda) == ("570.1", (12, 8))
    assert facts.gpus == (
        NvidiaGpu(name="Card", uuid=UUID, total_bytes=8 * 10**9, free_bytes=10**9, capability=None),
    )
    with pytest.raises(LookError, match="Driver Not Loaded"):
        read_nvidia(nvml("Driver Not Loaded"))


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.mark.slow
def test_torch_is_asked_in_a_process_that_may_crash_hang_or_babble() -> None:
    assert read_torch(python('print(\'{"version": "9"}\')')) == TorchFacts(version="9")
    with pytest.raises(LookError, match="crashed when it was asked: Illegal instruction"):
        read_torch(python("import sys; sys.exit('no\\nIllegal instruction')"))
    with pytest.raises(LookError, match="exit status -9"):
        read_torch(python("import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(LookError, match="exit status 0"):
        read_torch(python("print('a greeting of some library')"))
    with pytest.raises(LookError, match=r"not answered for 0\.1 s"):
        read_torch(python("import threading; threading.Event().wait()"), deadline_s=0.1)
    with pytest.raises(LookError, match="could not be asked"):
        read_torch(("/nonexistent",))
