"""The 20-round trajectory that every version, machine and library must reproduce.

A change of these hashes splits every running swarm. Where that is meant, the run's format changes,
and the file is written anew: `python -m tests.volunteer.training.synthetic_run --codec ID`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.volunteer.training.synthetic import make_spec
from tests.volunteer.training.synthetic_run import synthetic_rounds

GOLDEN_DIR = Path(__file__).parents[2] / "golden"
FILES = {
    "int4": "trajectory_20_rounds.json",
    "int8": "trajectory_20_rounds_int8.json",
    "fp16": "trajectory_20_rounds_fp16.json",
    "fp32": "trajectory_20_rounds_fp32.json",
    "topk2": "trajectory_20_rounds_topk2.json",
}


@pytest.mark.slow
@pytest.mark.parametrize("codec_id", FILES)
def test_the_trajectory_is_the_golden_one(codec_id: str) -> None:
    golden = json.loads((GOLDEN_DIR / FILES[codec_id]).read_text("utf-8"))
    spec = make_spec(codec_id=codec_id)
    rounds = list(synthetic_rounds(spec, num_rounds=20, num_members=6))
    hashes = [spec.genesis.state_hash, *(item.state_hash for item in rounds)]
    assert hashes == golden["state_hashes"]
    assert len(set(hashes)) == 21
    # What makes it worth having: the hostile member is refused in rounds 3, 10 and 17; with a
    # sparse codec also in later ones, since its error feedback still holds what it did.
    refused = [item.round_index for item in rounds if item.num_refused]
    assert refused == ([4, 6, 7, 9, 11, 15, 19] if codec_id == "topk2" else [3, 10, 17])
