"""Coding takes the blob and no other memory that grows with the model: in a real process."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
BENCHMARK = REPOSITORY / "packaging" / "benchmarks" / "bench_codec.py"
PARAMETERS = 32_000_000
OWN_MIB = 64.0
"""Slices that two threads work on, and what malloc keeps of them: half of one vector."""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("codec", ["int4", "topk2/64"])
def test_the_peak_is_the_blob_and_a_few_slices(codec: str) -> None:
    command = [sys.executable, str(BENCHMARK), "--here", "--codecs", codec, "--threads", "2"]
    command += ["--parameters", str(PARAMETERS), "--turns", "1"]
    finished = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        check=True,
        text=True,
    )
    rows = {row[7]: row for row in csv.reader(finished.stdout.splitlines())}
    assert set(rows) == {"copy", "encode", "decode", "parse", "aggregate"}
    blob_mib = PARAMETERS * float(rows["encode"][5]) / 2**20
    assert 0 < float(rows["decode"][11]) < blob_mib + OWN_MIB
    assert float(rows["aggregate"][11]) < 2 * blob_mib + OWN_MIB
