"""A machine that is too small for a run is told so before anything starts."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from volunteer.agent.joined_run import verify_hardware
from volunteer.config import Config
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import ConfigError, RunSpecError
from volunteer.run import HardwareSpec
from volunteer.run_limits import verify_limits

DEMO = load_builtin_run("demo")
BIG = msgspec.structs.replace(
    DEMO, hardware=HardwareSpec(ram_bytes=8_000_000_000, disk_bytes=20_000_000_000)
)


def test_a_run_without_needs_runs_anywhere() -> None:
    verify_hardware(DEMO, 1, 0)


def test_enough_is_enough_and_an_unknown_disk_is_no_reason() -> None:
    verify_hardware(BIG, 8_000_000_000, 20_000_000_000)
    verify_hardware(BIG, 8_000_000_000, None)


def test_everything_that_is_short_is_named() -> None:
    with pytest.raises(RunSpecError, match=r"8.0 GB of memory \(4.0 here\) and 20.0 GB") as caught:
        verify_hardware(BIG, 4_000_000_000, 1_000_000_000)
    assert "smaller run" in caught.value.hint


def test_without_limits_there_is_nothing_to_refuse() -> None:
    verify_limits(DEMO, Config())


def test_limits_with_which_it_could_never_run_are_named_together() -> None:
    big = msgspec.structs.replace(
        DEMO, model=msgspec.structs.replace(DEMO.model, num_layers=64, dim=2048, ffn_dim=8192)
    )
    limits = Config(disk_max_bytes=10**9, ram_max_bytes=10**9, gpu_max_bytes=2 * 1024**3)
    with pytest.raises(ConfigError, match=r"never run: `disk_max_bytes` is 1.00 GB, .* needs") as e:
        verify_limits(big, limits)
    assert all(key in str(e.value) for key in ("disk_max", "ram_max", "gpu_max"))
    on_cpu = dataclasses.replace(limits, device="cpu", disk_max_bytes=0, ram_max_bytes=0)
    verify_limits(big, on_cpu)
    enough = Config(disk_max_bytes=10**13, ram_max_bytes=10**13, gpu_max_bytes=10**13)
    verify_limits(big, enough)
