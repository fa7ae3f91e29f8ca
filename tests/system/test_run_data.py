"""A run on files of one's own, in a tokenizer of its own, with private text: two real agents."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from p2p.blobstore import blob_id_of_bytes
from tests.system.agents import RealAgent, ending, is_alive, wait_until
from tests.system.swarms import FLAGS, TINY_MODEL, tiny_spec
from tests.volunteer.training.texts import VOCABULARY, bpe_tokenizer, milton
from volunteer.answers import Status
from volunteer.errors import NoAgentError
from volunteer.locations import HOME_VARIABLE
from volunteer.run import RunSpec, format_run_spec
from volunteer.training.genesis import genesis_hash

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full]
SECRET = "Vilhelmina-Ostergaard-4711"
FOLDER = "diary of mine"


def spec_on(pattern: str, tokenizer: bytes) -> RunSpec:
    spec = tiny_spec(model=msgspec.structs.replace(TINY_MODEL, vocab_size=VOCABULARY))
    data = msgspec.structs.replace(
        spec.data,
        sources=(pattern, "private:"),
        tokenizer=f"json:{blob_id_of_bytes(tokenizer)}",
        held_out_fraction=0.2,
    )
    spec = msgspec.structs.replace(spec, data=data)
    genesis = msgspec.structs.replace(spec.genesis, state_hash=genesis_hash(spec))
    return msgspec.structs.replace(spec, genesis=genesis)


def spawn(agent: RealAgent, run_file: Path, *flags: str) -> subprocess.Popen[bytes]:
    """Start an agent on a RunSpec file."""
    locations = agent.locations
    locations.prepare()
    argv = [sys.executable, "-P", "-m", "volunteer.agent", *FLAGS, "--no-mdns", "--no-dht"]
    argv += ["--listen", "/ip4/127.0.0.1/tcp/0", "--run-file", str(run_file), *flags]
    with (locations.log_dir / "agent.log").open("ab") as log_file:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            env={**os.environ, HOME_VARIABLE: str(agent.home)},
            start_new_session=True,
        )
    agent.pids.append(process.pid)
    return process


@pytest.mark.timeout(240)
def test_two_train_on_files_and_nothing_private_is_anywhere_else(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(milton(300_000))
    private = tmp_path / FOLDER
    private.mkdir()
    (private / "letter.txt").write_text(f"{SECRET} wrote this. " * 500)
    tokenizer = bpe_tokenizer()
    spec = spec_on(f"file:{texts}/*.txt", tokenizer)
    with_tokenizer, without = tmp_path / "with" / "run.toml", tmp_path / "without" / "run.toml"
    for run_file in (with_tokenizer, without):
        run_file.parent.mkdir()
        run_file.write_text(format_run_spec(spec), "utf-8")
    (with_tokenizer.parent / "tokenizer.json").write_bytes(tokenizer)
    first, second = RealAgent(tmp_path / "a"), RealAgent(tmp_path / "b")
    allowed = "allow_file_sources = true\n"  # nobody has signed it
    for agent, more in ((first, f'private_data = "{private}"\n'), (second, "")):
        agent.locations.prepare()
        agent.locations.config_file.write_text(allowed + more, "utf-8")

    with ending([first, second]):
        processes = [spawn(first, with_tokenizer)]
        processes.append(spawn(second, without, "--bootstrap", first_address(first)))
        for agent in (first, second):
            status = wait_up(agent, "3 rounds and a loss", 3)
            assert status.held_out_loss is not None
            assert 0.5 < status.held_out_loss < 6.0 / 1.5  # log(400) a token, of 2 bytes or so
            assert status.held_out_stderr is not None
            assert status.held_out_windows is not None
            assert 1 <= status.held_out_windows <= 16
            assert SECRET not in msgspec.json.encode(status).decode()
        points = [point for point in first.history() if point.num_windows]
        assert points
        assert all(point.loss_stderr for point in points)
        sample = first.allmende("sample", "the", "--max-tokens", "20", "--json")
        assert sample.returncode == 0, sample.stderr
    for process in processes:
        process.wait(20.0)
    assert "tokenizer=" in second.logged()
    own_cache = first.locations.runs_dir / spec.run_id / "data"
    for home in (first.home, second.home):
        for file in (f for f in home.rglob("*") if f.is_file() and own_cache not in f.parents):
            content = file.read_bytes()
            assert SECRET.encode() not in content, file
            is_owners = file.name in ("local_data.json", "config.toml")
            assert is_owners or FOLDER.encode() not in content, file


def first_address(agent: RealAgent) -> str:
    return wait_up(agent, "it listens", 0).listen_addrs[0]


def wait_up(agent: RealAgent, what: str, round_index: int) -> Status:
    """Wait until it listens and has measured a state of `round_index` or above."""

    def look() -> Status | None:
        try:
            status = agent.status()
        except NoAgentError:
            assert is_alive(agent.pids[-1]), agent.logged()[-2000:]
            return None
        is_measured = round_index == 0 or status.held_out_loss is not None
        is_there = status.round_index >= round_index and is_measured
        return status if status.listen_addrs and is_there else None

    return wait_until(f"{agent.home.name}: {what}", look, 100.0)
