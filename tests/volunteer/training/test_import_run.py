"""A model of Hugging Face's form becomes a run that begins from it, or is refused with its cure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from p2p.blobstore import BlobStore, blob_id_of_bytes
from tests.volunteer.training.test_import_weights import MODEL, random_P, write_model
from volunteer.answers import Imported
from volunteer.errors import CheckpointCorruptError, RunSpecError, VolunteerError
from volunteer.messages import (
    AggregatorFailed,
    BuildGenesis,
    StateBuilt,
    StateVerified,
    VerifyState,
)
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import RunSpec, read_run_spec
from volunteer.training import export
from volunteer.training.aggregator import Aggregator, answer_line
from volunteer.training.export import byte_tokenizer
from volunteer.training.genesis import build_genesis
from volunteer.training.import_run import Wishes, import_run
from volunteer.training.layout import num_parameters
from volunteer.training.state import SharedState, read_state, write_state

WISHES = Wishes(name="taken-over", like=None, has_bytes=False)


def tokenizer_of(num_tokens: int) -> bytes:
    vocabulary = {f"t{i}": i for i in range(num_tokens)}
    return json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary}}).encode()


def make_folder(folder: Path, vocab_size: int = 256, tokenizer: bytes | None = None) -> Path:
    folder.mkdir()
    write_model(folder, msgspec.structs.replace(MODEL, vocab_size=vocab_size))
    if tokenizer is not None:
        (folder / export.TOKENIZER_NAME).write_bytes(tokenizer)
    return folder


BYTES = json.dumps(byte_tokenizer()).encode()


def imported(tmp_path: Path, wishes: Wishes = WISHES) -> tuple[Imported, RunSpec]:
    made = import_run(tmp_path / "model", tmp_path / "imports", tmp_path / "a" / "run.toml", wishes)
    return made, read_run_spec(tmp_path / "a" / "run.toml")


def test_the_run_begins_from_the_weights_without_momentum(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", tokenizer=BYTES)
    made, spec = imported(tmp_path)
    assert (made.run_id, made.run_name, made.tokenizer) == (spec.run_id, "taken-over", "bytes")
    assert spec.model == MODEL
    assert spec.genesis.is_given
    assert spec.genesis.state_hash == made.state_hash
    assert spec.licence == "", "that of `commons` is not theirs"
    imports = BlobStore(tmp_path / "imports")
    assert imports.list_ids() == (made.state_hash,)
    state = read_state(imports.file_of(made.state_hash), num_parameters(MODEL))
    assert torch.equal(state.weights_P, random_P(MODEL))
    assert not state.momentum_P.any()
    assert imported(tmp_path)[0] == made, "again changes nothing"
    with pytest.raises(RunSpecError, match="is another run's"):
        imported(tmp_path, Wishes(name="other", like=None, has_bytes=False))


def test_the_rest_is_that_of_a_run_that_one_names(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(300)
    make_folder(tmp_path / "model", 304, tokenizer)
    like = tmp_path / "like.toml"
    make_folder(tmp_path / "bytes", tokenizer=BYTES)
    import_run(tmp_path / "bytes", tmp_path / "imports", like, WISHES)
    text = like.read_text().replace("lr = 0.002", "lr = 0.0001")
    like.write_text(text.replace('publisher = ""', 'publisher = "me"'))
    made, spec = imported(tmp_path, Wishes(name="taken-over", like=like, has_bytes=False))
    assert (spec.inner.lr, spec.publisher, spec.model.vocab_size) == (0.0001, "", 304)
    assert made.tokenizer == spec.data.tokenizer == f"json:{blob_id_of_bytes(tokenizer)}"
    assert BlobStore(tmp_path / "imports").verify(spec.data.tokenizer_hash)


@pytest.mark.parametrize(
    ("vocab_size", "tokenizer", "has_bytes", "said", "hint"),
    [
        (256, None, False, "has no tokenizer.json", "--bytes"),
        (300, None, True, ".* is 300, and there are 256 bytes", "leave `--bytes` away"),
        (300, tokenizer_of(300), True, "300, and there are 256 bytes", "leave `--bytes` away"),
        (299, tokenizer_of(300), False, "300 tokens, .* is 299", "resize_token_embeddings(300)"),
        (300, b'{"version": "1.0", "model": {}}', False, "has 0 tokens", "tokenizer.json"),
        (300, b"{}", False, "is no tokenizer.json", ""),
    ],
)
def test_a_vocabulary_that_is_not_the_models_is_refused(
    vocab_size: int, tokenizer: bytes | None, has_bytes: bool, said: str, hint: str, tmp_path: Path
) -> None:
    make_folder(tmp_path / "model", vocab_size, tokenizer)
    with pytest.raises(VolunteerError, match=said) as caught:
        imported(tmp_path, Wishes(name="x", like=None, has_bytes=has_bytes))
    assert hint in caught.value.hint
    assert not (tmp_path / "a").exists()


def test_bytes_are_taken_at_the_owners_word(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    made, spec = imported(tmp_path, Wishes(name="x", like=None, has_bytes=True))
    assert made.tokenizer == spec.data.tokenizer == "bytes"


def test_damaged_weights_make_no_run(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", tokenizer=BYTES)
    file = tmp_path / "model" / export.WEIGHTS_NAME
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointCorruptError) as caught:
        imported(tmp_path)
    assert caught.value.hint.startswith("save or fetch")
    assert not (tmp_path / "imports").exists()
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_a_kill_leaves_nothing_that_a_second_import_does_not_take_up(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", tokenizer=BYTES)
    argv = [sys.executable, "-P", "-c", KILLED_BEFORE_RENAME, "--from", str(tmp_path / "model")]
    argv += ["--imports", str(tmp_path / "imports"), "--name", "taken-over"]
    argv += ["--spec", str(tmp_path / "a" / "run.toml")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.run(argv, env=environment, check=False, timeout=20)
    assert process.returncode == -signal.SIGKILL
    assert [file.name[:5] for file in (tmp_path / "imports").iterdir()] == [".tmp-"]
    assert not (tmp_path / "a").exists()
    made, _ = imported(tmp_path)
    left = {file.name.partition(".")[0] for file in (tmp_path / "imports").iterdir()}
    assert left == {made.state_hash}


KILLED_BEFORE_RENAME = """
import os, signal
from p2p.blobstore import BlobStore
from volunteer.training import import_run
BlobStore.adopt_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
import_run.main()
"""


# --------------------------------------------------------------------------- what it begins from


def aggregator_of(spec: RunSpec, folder: Path) -> tuple[Aggregator, BlobStore]:
    store = BlobStore(folder)
    return Aggregator(spec, DENSE_MODULE, store), store


def given(spec: RunSpec, state_hash: str) -> RunSpec:
    genesis = msgspec.structs.replace(spec.genesis, state_hash=state_hash)
    return msgspec.structs.replace(spec, genesis=genesis)


def test_the_aggregator_takes_the_given_state_and_makes_none(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", tokenizer=BYTES)
    made, spec = imported(tmp_path)
    with pytest.raises(RunSpecError, match="cannot be computed"):
        build_genesis(spec)
    aggregator, store = aggregator_of(spec, tmp_path / "blobs")
    refused = answer_line(aggregator, msgspec.json.encode(BuildGenesis(request_id=3)))
    assert isinstance(refused, AggregatorFailed)
    assert store.list_ids() == ()
    data = BlobStore(tmp_path / "imports").file_of(made.state_hash).read_bytes()
    assert store.add_bytes(data) == made.state_hash
    built = aggregator.answer(BuildGenesis(request_id=4))
    assert isinstance(built, StateBuilt)
    assert built.state_hash == made.state_hash
    verified = aggregator.answer(VerifyState(request_id=5, state_hash=made.state_hash))
    assert isinstance(verified, StateVerified)


def test_a_given_state_with_momentum_is_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "model", tokenizer=BYTES)
    _, spec = imported(tmp_path)
    weights_P = random_P(MODEL)
    momentum_P = torch.zeros_like(weights_P)
    momentum_P[-1] = 1e-30
    store = BlobStore(tmp_path / "blobs")
    state_hash = write_state(SharedState(weights_P=weights_P, momentum_P=momentum_P), store)
    aggregator, _ = aggregator_of(given(spec, state_hash), tmp_path / "blobs")
    for _ in range(2):  # not remembered as looked through
        with pytest.raises(RunSpecError, match="has outer momentum"):
            aggregator.answer(VerifyState(request_id=1, state_hash=state_hash))
    # As the state of a later commit it would be right.
    other, _ = aggregator_of(spec, tmp_path / "blobs")
    other.answer(VerifyState(request_id=1, state_hash=state_hash))
