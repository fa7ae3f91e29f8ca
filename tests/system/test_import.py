"""A run that begins from an exported model: import, publish, and others who fetch its weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from tests.system.agents import PROGRAM, RealAgent, ending, wait_until
from tests.system.swarms import CHUNKED_MODEL, tiny_spec
from volunteer.answers import Status
from volunteer.locations import HOME_VARIABLE
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import RunSpec, format_run_spec, read_run_spec
from volunteer.training.export import WEIGHTS_NAME, read_weights
from volunteer.training.layout import num_parameters
from volunteer.training.state import read_state

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full]
FLAGS = (
    *("--ignore-idle", "--device", "cpu", "--threads", "1", "--no-mdns", "--no-dht"),
    *("--listen", "/ip4/127.0.0.1/tcp/0"),
)
SLOW_BYTES_PER_S = 700_000
"""What the publisher gives in all: a state of 7.5 MB takes two others 20 s."""


def agent_on(home: Path, run_file: Path, *flags: str) -> RealAgent:
    return RealAgent(home, (*FLAGS, "--run-file", str(run_file), *flags))


def exported_model(tmp_path: Path, run_file: Path) -> Path:
    """Train a run for a round, and return where its weights were exported to."""
    trained, into = agent_on(tmp_path / "first", run_file), tmp_path / "model"
    with ending([trained]):
        trained.start()
        trained.wait_for("a round", lambda s: s.round_index >= 1, 90)
        done = trained.allmende("export", str(into))
        assert done.returncode == 0, done.stderr
    return into


def killed_import(publisher: RealAgent, argv: list[str]) -> None:
    """Begin an import, and kill it while it reads or writes."""
    process = subprocess.Popen(
        [str(PROGRAM), *argv],
        env={**os.environ, HOME_VARIABLE: str(publisher.home)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    imports_dir = publisher.locations.imports_dir
    wait_until("it has begun", imports_dir.is_dir, 60)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def imported_run(publisher: RealAgent, model: Path, like: Path, run_file: Path) -> RunSpec:
    """Import `model`, after a first try that was killed, and sign the run."""
    argv = ["import", str(model), "--spec", str(run_file), "--like", str(like), "--name", "again"]
    killed_import(publisher, argv)
    done = publisher.allmende(*argv, "--json", deadline_s=120.0)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    spec = read_run_spec(run_file)
    assert (made["run_id"], made["state_hash"]) == (spec.run_id, spec.genesis.state_hash)
    refused = publisher.allmende("import", str(like.parent), "--spec", str(like))
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    done = publisher.allmende("publish", str(run_file), "--json")
    assert done.returncode == 0, done.stderr
    return read_run_spec(run_file)


def is_in_fetch(status: Status) -> bool:
    progress = status.catch_up
    has_come = progress is not None and progress.held_bytes >= 1_500_000
    return has_come and "MB" in status.reason


@pytest.mark.timeout(600)
def test_two_others_fetch_what_was_exported_and_train_on(tmp_path: Path) -> None:
    like, run_file = tmp_path / "like.toml", tmp_path / "run.toml"
    like.write_text(format_run_spec(tiny_spec(model=CHUNKED_MODEL)), "utf-8")
    model = exported_model(tmp_path, like)
    publisher = agent_on(tmp_path / "publisher", run_file)
    spec = imported_run(publisher, model, like, run_file)
    assert spec.genesis.is_given
    publisher.locations.config_file.write_text(
        f"upload_bytes_per_s = {SLOW_BYTES_PER_S}\n", "utf-8"
    )
    lonely = agent_on(tmp_path / "lonely", run_file)
    with ending([lonely]):
        lonely.start()
        told = lonely.wait_for("why it waits", lambda s: "not on this machine" in s.reason, 60)
        assert "--bootstrap" in told.reason
        assert told.state == "starting"
    with ending([publisher]):
        address = publisher.start().listen_addrs[0]
        others = [
            agent_on(tmp_path / name, run_file, "--bootstrap", address) for name in ("b", "c")
        ]
        with ending(others):
            for other in others:
                other.start()
            told = others[0].wait_for("it is fetching", is_in_fetch, 120)
            assert told.round_index == 0
            assert told.state in ("starting", "catching_up")
            others[0].kill()
            parts = list(others[0].locations.blobs_dir(spec.run_id, DENSE_MODULE).glob("*.partial"))
            assert parts, "what had come is on the disk"
            others[0].start()
            for agent in (publisher, *others):
                agent.wait_for("two rounds", lambda s: s.round_index >= 2, 240)
            hashes = {p.round_index: p.state_hash for p in publisher.history()}
            assert hashes[0] == spec.genesis.state_hash
            for other in others:
                own = {p.round_index: p.state_hash for p in other.history()}
                shared = own.keys() & hashes.keys() - {0}
                assert shared
                assert {own[i] for i in shared} == {hashes[i] for i in shared}
            into = tmp_path / "trained on"
            done = others[1].allmende("export", str(into), "--json")
            assert done.returncode == 0, done.stderr
            state_hash = json.loads(done.stdout)["state_hash"]
            blobs = others[1].locations.blobs_dir(spec.run_id, DENSE_MODULE)
            state = read_state(blobs / state_hash, num_parameters(spec.model))
            weights_P = read_weights(into / WEIGHTS_NAME, spec.model)
            assert torch.equal(weights_P, state.weights_P)
    before_P = read_weights(model / WEIGHTS_NAME, spec.model)
    assert not torch.equal(weights_P, before_P)
    verify_in_transformers(into)


def verify_in_transformers(folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([tokenizer("And the")["input_ids"]])
    assert tokens.shape == (1, 7)
    with torch.no_grad():
        assert bool(torch.isfinite(theirs(tokens).logits).all())
