"""A machine that is too small for a run is told so before anything starts."""

from __future__ import annotations

import msgspec
import pytest

from volunteer.agent.joined_run import verify_hardware
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.run import HardwareSpec

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
