"""The 20-round trajectory that every version, machine and library must reproduce.

A change of these hashes splits every running swarm. Where that is meant, the run's format changes,
and the file is written anew: `python -m tests.volunteer.training.synthetic_run`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.volunteer.training.synthetic import make_spec
from tests.volunteer.training.synthetic_run import synthetic_rounds

GOLDEN_FILE = Path(__file__).parents[2] / "golden" / "trajectory_20_rounds.json"


@pytest.mark.slow
def test_the_trajectory_is_the_golden_one() -> None:
    golden = json.loads(GOLDEN_FILE.read_text("utf-8"))
    spec = make_spec()
    rounds = list(synthetic_rounds(spec, num_rounds=20, num_members=6))
    hashes = [spec.genesis.state_hash, *(item.state_hash for item in rounds)]
    assert hashes == golden["state_hashes"]
    assert len(set(hashes)) == 21
    # What makes it worth having: the hostile member is refused in rounds 3, 10 and 17.
    assert [item.round_index for item in rounds if item.num_refused] == [3, 10, 17]
