"""`allmende export` with a real agent: what is written is the state that it stands on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.system.agents import RealAgent, ending
from volunteer.answers import Status
from volunteer.run import read_run_spec
from volunteer.training.export import WEIGHTS_NAME, read_weights
from volunteer.training.layout import num_parameters
from volunteer.training.state import read_state

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(120)]

FLAGS = ("--no-mdns", "--no-dht", "--device", "cpu", "--listen", "/ip4/127.0.0.1/tcp/0")


def has_state(agent: RealAgent, status: Status) -> bool:
    """Return whether the state that it tells of has been made: its hash is known before."""
    blobs = agent.locations.blobs_dir(status.run_id, "dense")
    return bool(status.state_hash) and (blobs / status.state_hash).exists()


def test_the_weights_are_those_of_the_state(tmp_path: Path) -> None:
    agent = RealAgent(tmp_path / "home", FLAGS)
    into = tmp_path / "model"
    with ending([agent]):
        agent.start()
        early = agent.allmende("export", str(tmp_path / "early"))
        assert early.returncode == 0 or "`allmende status` says how far" in early.stderr
        status = agent.wait_for("it has weights", lambda s: has_state(agent, s), 60)
        done = agent.allmende("export", str(into), "--json")
        assert done.returncode == 0, done.stderr
        exported = json.loads(done.stdout)
        assert exported["state_hash"] == status.state_hash
        spec = read_run_spec(agent.locations.run_spec_file(status.run_id))
        blobs = agent.locations.blobs_dir(status.run_id, "dense")
        state = read_state(blobs / status.state_hash, num_parameters(spec.model))
        assert torch.equal(read_weights(into / WEIGHTS_NAME, spec.model), state.weights_P)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").write_text("{}")
        refused = agent.allmende("export", str(tmp_path / "other"))
        assert refused.returncode == 1
        assert refused.stderr.count("\n") == 2
        assert "holds another model" in refused.stderr
