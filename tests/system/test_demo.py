"""The demo: a real swarm whose every commit is reproduced from its published records."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

from tests.system.agents import RealAgent

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.mark.timeout(420)
@pytest.mark.parametrize("minutes", ["1.25", pytest.param("2", marks=pytest.mark.full)])
def test_three_volunteers_train_one_model(tmp_path: Path, minutes: str) -> None:
    user = RealAgent(tmp_path / "user")
    kept = tmp_path / "kept"
    argv = ("demo", "--volunteers", "3", "--minutes", minutes, "--json", "--keep", str(kept))
    done = user.allmende(*argv, deadline_s=360.0)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)

    assert result["rounds_committed"] >= 3
    assert len(result["volunteers"]) == 3
    assert len({volunteer["state_hash"] for volunteer in result["volunteers"]}) == 1
    losses = [loss for loss in result["held_out_loss"] if loss is not None]
    assert losses[-1] < 2.6
    assert losses[0] - losses[-1] >= 0.4
    rises = sum(later > earlier for earlier, later in itertools.pairwise(losses))
    assert rises <= len(losses) / 4

    check = result["check"]
    assert check["commits_reproduced"] == check["num_commits"] >= 3
    assert check["drops_noticed"] == check["drops_tried"] > 0
    assert len(check["listed_by_author"]) == 3
    assert min(check["listed_by_author"].values()) >= 2
    assert result["problems"] == []

    again = user.allmende("demo", "--verify", str(kept), "--json", deadline_s=120.0)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["commits_reproduced"] == check["num_commits"]

    # The control: a flipped byte in one published contribution is found out.
    blobs = sorted(kept.glob("volunteer-*/runs/*/modules/dense/blobs/*"))
    small = [blob for blob in blobs if blob.is_file() and 1000 < blob.stat().st_size < 400_000]
    name = small[0].name
    for blob in [blob for blob in blobs if blob.name == name]:
        data = bytearray(blob.read_bytes())
        data[-1] ^= 0x10
        blob.write_bytes(data)
    forged = user.allmende("demo", "--verify", str(kept), deadline_s=120.0)
    assert forged.returncode == 1, forged.stdout
    shutil.rmtree(kept)
