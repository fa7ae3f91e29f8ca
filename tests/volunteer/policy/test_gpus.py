"""Other programs on the GPU: NVML's twin says what the real one says, and DRM's files are files."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from volunteer.policy.sensors import nvidia
from volunteer.policy.sensors.drm import DrmSource, find_cards, read_clients
from volunteer.policy.sensors.machine import _together
from volunteer.policy.sensors.nvidia import NvidiaSource
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError
from volunteer.policy.signals import GpuReading

AGENT, TRAINER, GAME = 10, 11, 4242
OURS = frozenset({AGENT, TRAINER})
A, B = "GPU-aaaaaaaa-0000-1111-2222-333344445555", "GPU-bbbbbbbb-0000-1111-2222-333344445555"
GB = 10**9


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


@dataclass
class Gpu:
    uuid: str = A
    free: int = 8 * GB
    celsius: int = 45
    busy: int | None = 0
    compute: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    samples: list[tuple[int, int, int]] | NVMLError = field(default_factory=list)
    """(pid, time, percent)."""


class Nvml:
    """The module pynvml, as far as it is used."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NoPermission = NVMLError_NoPermission
    NVMLError_NotFound = NVMLError_NotFound
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus
        self.init_error: NVMLError | None = None
        self.num_open = 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self.init_error
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> bytes:
        return gpu.uuid.encode()

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:  # noqa: ANN401
        return SimpleNamespace(free=gpu.free)

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        return gpu.celsius

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:  # noqa: ANN401
        if gpu.busy is None:
            raise NVMLError_NotSupported
        return SimpleNamespace(gpu=gpu.busy)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.compute]

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: Gpu) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in gpu.graphics]

    def nvmlDeviceGetProcessUtilization(self, gpu: Gpu, since: int) -> list[Any]:
        if isinstance(gpu.samples, NVMLError):
            raise gpu.samples
        fresh = [s for s in gpu.samples if s[1] > since]
        if not fresh:
            raise NVMLError_NotFound
        return [SimpleNamespace(pid=pid, timeStamp=at, smUtil=used) for pid, at, used in fresh]


def source(
    *gpus: Gpu, ours: frozenset[int] = OURS, uuids: tuple[str, ...] = (), is_trained_on: bool = True
) -> NvidiaSource:
    return NvidiaSource(uuids, lambda: ours, Nvml(*gpus), is_trained_on=is_trained_on)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Process:
        def __init__(self, pid: int) -> None:
            if pid != GAME:
                raise psutil.NoSuchProcess(pid)

        def name(self) -> str:
            return "game.x86_64"

    monkeypatch.setattr(psutil, "Process", Process)


def test_while_nothing_of_ours_runs_all_use_is_others() -> None:
    gpu = Gpu(busy=30, graphics=[(GAME, 3 * GB)], compute=[(77, None)])
    assert source(gpu, ours=frozenset({AGENT})).read() == GpuReading(
        others_fraction=0.3,
        free_bytes=8 * GB,
        temperature_celsius=45.0,
        others=("game.x86_64 (3.0 GB)", "process 77"),
    )


def test_our_own_use_is_told_apart() -> None:
    gpu = Gpu(
        busy=99,
        free=GB,
        compute=[(TRAINER, 5 * GB)],
        graphics=[(GAME, GB)],
        samples=[(TRAINER, 100, 95), (GAME, 90, 80), (GAME, 100, 20), (0, 100, 50)],
    )
    nvml = source(gpu)
    reading = nvml.read()
    assert reading.others_fraction == 0.2, "the latest sample of each"
    assert reading.free_bytes == 6 * GB, "what is ours is free for us"
    assert reading.others == ("game.x86_64 (1.0 GB)",)
    assert nvml.read().others_fraction == 0.0, "no new sample: nobody has used it since"


def test_in_a_container_nothing_is_said_while_we_train() -> None:
    """NVML names the host's processes: ours are not among them, and must not pause us."""
    gpu = Gpu(busy=99, free=GB // 2, compute=[(90_001, 7 * GB)])
    reading = source(gpu).read()
    assert (reading.others_fraction, reading.free_bytes) == (None, None)
    assert reading.temperature_celsius == 45.0
    resting = source(gpu, ours=frozenset({AGENT})).read()
    assert (resting.others_fraction, resting.free_bytes) == (0.99, GB // 2)
    on_cpu = source(gpu, is_trained_on=False).read()
    assert on_cpu.others_fraction == 0.99, "a trainer on the CPU uses none of it"


def test_old_cards_that_do_not_tell_by_process_are_unknown_while_we_train() -> None:
    gpu = Gpu(busy=99, compute=[(TRAINER, GB)], samples=NVMLError_NotSupported())
    assert source(gpu).read().others_fraction is None
    nothing = Gpu(busy=None)
    assert source(nothing, ours=frozenset({AGENT})).read().others_fraction is None


def test_the_worst_of_the_chosen_gpus_counts() -> None:
    first, second = Gpu(busy=5, free=2 * GB, celsius=40), Gpu(B, busy=50, free=9 * GB, celsius=80)
    ours = frozenset({AGENT})
    both = source(first, second, ours=ours).read()
    assert both.others_fraction == 0.5
    assert (both.free_bytes, both.temperature_celsius) == (2 * GB, 80.0)
    assert source(first, second, ours=ours, uuids=(A,)).read().others_fraction == 0.05
    with pytest.raises(SensorError, match="none of the GPUs in `gpus` is here"):
        source(first, ours=ours, uuids=(B,)).read()


def test_a_driver_that_was_replaced_says_reboot_and_is_found_anew() -> None:
    nvml = Nvml(Gpu(busy=0))
    nvml.init_error = NVMLError("Driver/library version mismatch")
    gpus = NvidiaSource((), lambda: frozenset({AGENT}), nvml)
    with pytest.raises(SensorError, match="the NVIDIA driver was updated: reboot"):
        gpus.read()
    nvml.init_error = None
    assert gpus.read().others_fraction == 0.0
    assert nvml.num_open == 1
    gpus.close()
    gpus.close()
    assert nvml.num_open == 0


def test_without_a_driver_there_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not nvidia.has_library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert nvidia.has_library()


def test_several_makers_are_one_reading() -> None:
    one = GpuReading(others_fraction=0.1, free_bytes=5, others=("a",))
    two = GpuReading(others_fraction=0.4, temperature_celsius=60.0, others=("b",))
    assert _together([one, two]) == GpuReading(
        others_fraction=0.4, free_bytes=5, temperature_celsius=60.0, others=("a", "b")
    )
    assert _together([]) == GpuReading()


# -------------------------------------------------------------------------------------------- DRM


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(proc_dir=tmp_path / "proc", sys_dir=tmp_path / "sys")


def make_card(places: Places, number: int, vendor: str, **values: int) -> None:
    device = places.sys_dir / "class" / "drm" / f"card{number}" / "device"
    device.mkdir(parents=True)
    (device / "vendor").write_text(vendor + "\n")
    for name, value in values.items():
        (device / name).write_text(f"{value}\n")


def make_process(places: Places, pid: int, name: str, **engines_ns: int) -> None:
    """A process that has its GPU open twice, as Mesa does."""
    folder = places.proc_dir / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "fdinfo").mkdir()
    (folder / "comm").write_text(name + "\n")
    for fd in (5, 6):
        os.symlink("/dev/dri/renderD128", folder / "fd" / str(fd))
    set_use(places, pid, **engines_ns)


def set_use(places: Places, pid: int, memory_kib: int = 1_000_000, **engines_ns: int) -> None:
    lines = [
        "pos:\t0",
        "drm-driver:\tamdgpu",
        f"drm-client-id:\t{pid}",
        "drm-pdev:\t0000:03:00.0",
        f"drm-memory-vram:\t{memory_kib} KiB",
        *(f"drm-engine-{name}:\t{ns} ns" for name, ns in engines_ns.items()),
    ]
    for fd in (5, 6):
        (places.proc_dir / str(pid) / "fdinfo" / str(fd)).write_text("\n".join(lines) + "\n")


def test_only_amds_and_intels_cards_are_looked_at(places: Places) -> None:
    make_card(places, 0, "0x10de")
    make_card(places, 1, "0x1002")
    make_card(places, 2, "0x8086")
    (places.sys_dir / "class" / "drm" / "card1-DP-1").mkdir()
    assert [card.parent.name for card in find_cards(places)] == ["card1", "card2"]


def test_a_client_counts_once_with_its_busiest_engine(places: Places) -> None:
    make_process(places, GAME, "game", gfx=500, dec=900)
    (client,) = read_clients(places.proc_dir / str(GAME) / "fdinfo")
    assert client.engine_ns == 900
    assert client.memory_bytes == 1_000_000 * 1024
    assert read_clients(places.proc_dir / "77" / "fdinfo") == []


def test_others_use_of_an_amd_gpu_is_measured_between_two_looks(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now_s)
    make_card(places, 0, "0x1002", mem_info_vram_total=8 * GB, mem_info_vram_used=3 * GB)
    make_process(places, GAME, "game", gfx=0)
    make_process(places, TRAINER, "python", compute=0)
    gpus = DrmSource(places, lambda: OURS)
    assert gpus.read().others_fraction == 0.0
    clock.now_s += 2.0
    set_use(places, GAME, gfx=int(0.6e9))
    set_use(places, TRAINER, compute=int(1.4e9))
    reading = gpus.read()
    assert reading.others_fraction == pytest.approx(0.3)
    assert reading.others == ("game (1.0 GB)",)
    assert reading.free_bytes == 5 * GB + 1_000_000 * 1024, "ours is free for us"
    gpus.close()


def test_while_nothing_of_ours_runs_the_whole_device_tells(places: Places) -> None:
    """Other users' programs cannot be read; that the device is busy can."""
    make_card(places, 0, "0x1002", gpu_busy_percent=80)
    (places.proc_dir / "1").mkdir(parents=True)
    assert DrmSource(places, lambda: frozenset({AGENT})).read().others_fraction == 0.8
    ours = DrmSource(places, lambda: OURS).read()
    assert (ours.others_fraction, ours.free_bytes) == (0.0, None)
