"""Threads and vector kernels do not enter the state: real processes, one per setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

REPOSITORY = Path(__file__).parents[3]
# 334,592 parameters: several slices, and more elements than torch keeps in one thread.
SIZE = ("--rounds", "3", "--members", "5", "--dim", "256", "--block-elements", "4096")
SETTINGS = {
    "one thread": (1, {}),
    "two threads": (2, {}),
    "plain kernels": (1, {"ATEN_CPU_CAPABILITY": "default"}),
    "plain kernels, two threads": (2, {"ATEN_CPU_CAPABILITY": "default"}),
}
PLAIN_NUMPY = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"
"""What numpy may do beyond SSE 4.2; where there is less, it says so and goes on."""
SPARSE_SETTINGS = {
    "one thread": (1, {}),
    "plain kernels, three threads": (
        3,
        {"ATEN_CPU_CAPABILITY": "default", "NPY_DISABLE_CPU_FEATURES": PLAIN_NUMPY},
    ),
}


def run(codec_id: str, num_threads: int, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.volunteer.training.synthetic_run", *SIZE]
    command += ["--codec", codec_id]
    finished = subprocess.run(
        [*command, "--threads", str(num_threads)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    )
    report: dict[str, Any] = msgspec.json.decode(finished.stdout)
    return report


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.parametrize("codec_id", ["int4", "fp16", "topk2"])
def test_the_same_hashes_with_any_threads_and_kernels(codec_id: str) -> None:
    settings = SPARSE_SETTINGS if codec_id == "topk2" else SETTINGS
    reports = {name: run(codec_id, threads, env) for name, (threads, env) in settings.items()}
    for name, report in reports.items():
        assert report["num_threads"] == settings[name][0], name
        assert report["state_hashes"] == reports["one thread"]["state_hashes"], name
        assert report["kernels"] == "DEFAULT" or not name.startswith("plain")
    assert len(reports["one thread"]["state_hashes"]) == 4
