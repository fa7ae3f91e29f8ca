"""What is exported is the model that was trained, as Hugging Face's own library sees it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from p2p.blobstore import BlobStore
from tests.fakes.tiny_disk import mounted_tiny_disk
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import CheckpointCorruptError, VolunteerError
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import ModelSpec, RunSpec, format_run_spec
from volunteer.training import export
from volunteer.training.layout import num_parameters
from volunteer.training.model import forward, weights_of
from volunteer.training.state import SharedState, write_state

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = pytest.mark.timeout(120)  # the import of transformers alone may take long

MODEL = ModelSpec(num_layers=2, dim=48, num_heads=3, ffn_dim=80, context_tokens=64, rope_base=500.0)
MOST_DIFFERENCE = 1e-4
TEXTS = ("To be, or not", " two  blanks\n\ttab", "é ß 你 \U0001f600", "\x00\x7f", "don't")


@pytest.fixture(autouse=True)
def keep_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb lowers its own process's priority; here that is pytest's."""
    monkeypatch.setattr(export, "lower_priority", lambda niceness: None)


@pytest.fixture
def weights_P() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return 0.2 * torch.randn(num_parameters(MODEL), generator=generator) + 0.05


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    spec = msgspec.structs.replace(load_builtin_run("demo"), model=MODEL)
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "spec.toml").write_text(format_run_spec(spec), "utf-8")
    return folder


@pytest.fixture
def state_hash(run_dir: Path, weights_P: torch.Tensor) -> str:
    store = BlobStore(run_dir / "modules" / DENSE_MODULE / "blobs")
    return write_state(SharedState(weights_P=weights_P, momentum_P=-weights_P), store)


def run_export(run_dir: Path, state_hash: str, into: Path) -> int:
    argv = ["--run-dir", str(run_dir), "--state-hash", state_hash, "--round-index", "7"]
    return export.main([*argv, "--into", str(into)])


@pytest.mark.slow
def test_transformers_gets_the_same_logits_and_tokens_and_gives_the_same_weights_back(
    run_dir: Path, state_hash: str, weights_P: torch.Tensor, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    into = tmp_path / "exported"
    assert run_export(run_dir, state_hash, into) == 0
    theirs = AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32)
    theirs.train(False)
    tokens_BT = torch.randint(0, 256, (3, MODEL.context_tokens))
    with torch.no_grad():
        seen_BTV = theirs(tokens_BT).logits
        expected_BTV = forward(weights_of(weights_P, MODEL), tokens_BT, MODEL)
    assert float(expected_BTV.abs().max()) > 1.0
    assert float((seen_BTV - expected_BTV).abs().max()) < MOST_DIFFERENCE
    theirs.save_pretrained(tmp_path / "saved")
    read_P = export.read_weights(tmp_path / "saved" / export.WEIGHTS_NAME, MODEL)
    assert torch.equal(read_P, weights_P)
    tokenizer = AutoTokenizer.from_pretrained(into)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == list(text.encode()), "tokens are bytes"
        assert tokenizer.decode(ids) == text


def test_an_export_says_where_it_comes_from_and_replaces_an_earlier_one(
    run_dir: Path, state_hash: str, tmp_path: Path
) -> None:
    into = tmp_path / "a" / "b"
    assert run_export(run_dir, state_hash, into) == 0
    before = {file.name: file.read_bytes() for file in into.iterdir()}
    assert set(before) == {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    card = before["README.md"].decode()
    assert state_hash in card
    assert "round 7" in card
    (into / "notes.txt").write_text("mine")
    (into / "model.safetensors").write_bytes(b"cut off")
    assert run_export(run_dir, state_hash, into) == 0
    after = {file.name: file.read_bytes() for file in into.iterdir()}
    assert after == before | {"notes.txt": b"mine"}


def test_a_run_without_a_licence_is_said_to_have_none() -> None:
    spec = load_builtin_run("demo")
    named = export.Provenance(spec, "0" * 64, 7)
    unnamed = export.Provenance(msgspec.structs.replace(spec, licence=""), "0" * 64, 7)
    assert f"- Licence: {spec.licence}\n" in export.model_card(named)
    assert "- Licence: the run names none\n" in export.model_card(unnamed)


def test_another_model_is_not_overwritten(
    run_dir: Path, state_hash: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run_export(run_dir, state_hash, tmp_path) == 1
    assert (tmp_path / "config.json").read_text() == "{}"
    assert "holds another model" in capsys.readouterr().err


def test_what_cannot_be_exported_is_named(
    run_dir: Path, state_hash: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_export(run_dir, "../../etc/passwd", tmp_path / "x") == 1
    assert "not on this disk" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run_export(run_dir, state_hash, tmp_path / "file" / "x") == 1
    assert "cannot be made" in capsys.readouterr().err
    store = BlobStore(run_dir / "modules" / DENSE_MODULE / "blobs")
    file = store.file_of(state_hash)
    file.chmod(0o600)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    assert run_export(run_dir, state_hash, tmp_path / "x") == 1
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_full_disk_is_said_and_the_earlier_weights_stay(
    run_dir: Path, state_hash: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size_kib = 4 * num_parameters(MODEL) // 1024
    with mounted_tiny_disk(tmp_path / "disk", size_kib=size_kib + 128) as disk:
        into = disk / "exported"
        assert run_export(run_dir, state_hash, into) == 0
        before = (into / export.WEIGHTS_NAME).read_bytes()
        assert run_export(run_dir, state_hash, into) == 1
        assert (into / export.WEIGHTS_NAME).read_bytes() == before
        assert not [file.name for file in into.iterdir() if file.name.startswith(".")]
    told = capsys.readouterr().err
    assert told.startswith("allmende: no space left to write ")
    assert told.count("\n") == 2


def test_a_folder_that_refuses_is_said(
    run_dir: Path,
    state_hash: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    into = tmp_path / "exported"

    def refuse(file: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))

    monkeypatch.setattr(export, "replace_file", refuse)
    assert run_export(run_dir, state_hash, into) == 1
    assert capsys.readouterr().err == f"allmende: {into / 'config.json'}: Permission denied\n"


def damaged(named: dict[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    norm = "model.norm.weight"
    match what:
        case "missing":
            return {name: tensor for name, tensor in named.items() if name != norm}
        case "more":
            return named | {"model.extra.weight": torch.zeros(3)}
        case "shape":
            return named | {norm: torch.zeros(MODEL.dim + 1)}
        case _:
            return named | {norm: torch.zeros(MODEL.dim, dtype=torch.float16)}


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "has no model.norm.weight"),
        ("more", "more than this model: model.extra.weight"),
        ("shape", r"float32 of \(49,\), not float32 of \(48,\)"),
        ("dtype", "is float16"),
    ],
)
def test_files_of_another_model_are_refused_by_name(
    weights_P: torch.Tensor, tmp_path: Path, what: str, words: str
) -> None:
    file = tmp_path / "model.safetensors"
    export.write_weights(file, weights_P, MODEL)
    assert torch.equal(export.read_weights(file, MODEL), weights_P)
    save_file(damaged(load_file(file), what), file)
    with pytest.raises(CheckpointCorruptError, match=words):
        export.read_weights(file, MODEL)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b'{"a":1}', (2**40).to_bytes(8, "little")])
def test_hostile_bytes_are_no_model(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(VolunteerError, match="no safetensors file"):
        export.read_weights(file, MODEL)


def test_the_config_is_of_the_builtin_run() -> None:
    spec: RunSpec = load_builtin_run("commons")
    config = json.loads(json.dumps(export.config_of(spec.model)))
    assert config["hidden_size"] == spec.model.dim
    assert config["head_dim"] * config["num_attention_heads"] == spec.model.dim
    assert config["tie_word_embeddings"] is True
