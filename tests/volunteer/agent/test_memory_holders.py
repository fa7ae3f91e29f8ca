"""Who holds the memory is named, the largest first, and never this program itself."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from volunteer.agent import memory_holders
from volunteer.agent.memory_holders import count_oom_kills, name_holders
from volunteer.policy.sensors.places import Places
from volunteer.policy.signals import GpuReading

GB = 10**9


def process(pid: int, name: str, rss: int, shared: int = 0) -> SimpleNamespace:
    memory = SimpleNamespace(rss=rss, shared=shared)
    return SimpleNamespace(pid=pid, info={"name": name, "memory_info": memory})


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """What runs on a machine of 10 GB without a GPU; process 1 is this program."""
    running: list[SimpleNamespace] = []
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: iter(running))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10 * GB))
    monkeypatch.setattr(memory_holders, "own_processes", lambda: frozenset({1}))
    monkeypatch.setattr(memory_holders, "has_library", lambda: False)
    monkeypatch.setattr(memory_holders, "find_cards", lambda places: [])
    return running


def test_programs_of_one_name_are_named_together(processes: list[SimpleNamespace]) -> None:
    processes += [
        process(1, "allmende", 5 * GB),
        process(2, "firefox", 2 * GB, shared=GB),
        process(3, "firefox", GB),
        process(4, "blender", 3 * GB),
        process(5, "bash", GB // 100),
        process(6, "code", GB),
        process(7, "tracker", GB // 2),
    ]
    assert name_holders("cpu") == ("blender (3.0 GB)", "firefox (2.0 GB)", "code (1.0 GB)")
    assert name_holders("cuda:0") == name_holders("cpu"), "no GPU is known: what is known is told"


def test_one_that_hides_its_memory_is_passed_over(processes: list[SimpleNamespace]) -> None:
    hidden = SimpleNamespace(pid=9, info={"name": "init", "memory_info": None})
    processes += [hidden, process(8, "", GB)]
    assert name_holders("cpu") == ("process 8 (1.0 GB)",)


def test_a_gpu_has_holders_of_its_own(
    processes: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Source:
        """Twin of the NVIDIA sensor."""

        def __init__(self, *_arguments: Any) -> None:
            self.is_closed = False

        def read(self) -> GpuReading:
            return GpuReading(others=("game (7.0 GB)",))

        def close(self) -> None:
            self.is_closed = True

    monkeypatch.setattr(memory_holders, "has_library", lambda: True)
    monkeypatch.setattr(memory_holders, "NvidiaSource", Source)
    processes.append(process(4, "blender", 3 * GB))
    assert name_holders("cuda:0") == ("game (7.0 GB)",)
    assert name_holders("cpu") == ("blender (3.0 GB)",)


def test_holders_of_other_makers_gpus_are_read_from_the_kernel(
    processes: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_holders, "find_cards", lambda places: [tmp_path])
    for pid, size_mib in ((1, 4096), (2, 2048), (3, 1024)):
        fdinfo_dir = tmp_path / str(pid) / "fdinfo"
        fdinfo_dir.mkdir(parents=True)
        (fdinfo_dir / "5").write_text(
            f"drm-client-id:\t{pid}\ndrm-pdev:\t0000:03:00.0\n"
            f"drm-memory-vram:\t{size_mib * 1024} KiB\n"
        )
        processes.append(process(pid, f"program{pid}", 0))
    places = Places(proc_dir=tmp_path)
    told = memory_holders._drm_holders(places, frozenset({1}))
    assert told == ("program2 (2.1 GB)", "program3 (1.1 GB)")


def test_this_machine_is_looked_at_without_an_error() -> None:
    assert count_oom_kills() >= 0
    for told in name_holders("cpu"):
        assert told.endswith(" GB)")
    assert all(str(os.getpid()) not in told for told in name_holders("cpu"))
