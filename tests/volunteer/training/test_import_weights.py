"""A model of Hugging Face's library is read as what it is, and what no run can have is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from p2p.blobstore import BlobStore
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import CheckpointCorruptError, VolunteerError
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import ModelSpec
from volunteer.training import export
from volunteer.training.export import Provenance, config_of, write_weights
from volunteer.training.import_weights import INDEX_NAME, read_huggingface
from volunteer.training.layout import num_parameters
from volunteer.training.model import forward, weights_of
from volunteer.training.state import SharedState, write_state

os.environ.setdefault("HF_HUB_OFFLINE", "1")

MODEL = ModelSpec(
    num_layers=2,
    dim=48,
    num_heads=6,
    num_kv_heads=2,
    tied_embeddings=False,
    ffn_dim=80,
    context_tokens=64,
    rope_base=500.0,
)
MOST_DIFFERENCE = 1e-4


def random_P(model: ModelSpec) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return 0.2 * torch.randn(num_parameters(model), generator=generator) + 0.05


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that this program has written."""
    write_model(tmp_path, MODEL)
    return tmp_path


def write_model(folder: Path, model: ModelSpec, **changes: object) -> None:
    (folder / export.CONFIG_NAME).write_text(json.dumps({**config_of(model), **changes}))
    write_weights(folder / export.WEIGHTS_NAME, random_P(model), model)


def random_llama(**changes: Any) -> Any:  # noqa: ANN401 -- the library has no types
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    shape = {
        "vocab_size": 96,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 300.0},
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
    }
    theirs = LlamaForCausalLM(LlamaConfig(**{**shape, **changes}))
    theirs.train(False)
    return theirs


@pytest.mark.slow
@pytest.mark.timeout(120)  # the import of transformers alone may take long
@pytest.mark.parametrize(
    ("changes", "most_bytes"),
    [({}, "5GB"), ({"tie_word_embeddings": True, "num_key_value_heads": 6}, "30KB")],
    ids=["grouped-untied", "tied-in-several-files"],
)
def test_a_model_of_transformers_gives_the_same_logits_here(
    changes: dict[str, Any], most_bytes: str, tmp_path: Path
) -> None:
    theirs = random_llama(**changes)
    theirs.save_pretrained(tmp_path, max_shard_size=most_bytes)
    assert (tmp_path / INDEX_NAME).exists() == (most_bytes != "5GB")
    found = read_huggingface(tmp_path)
    model = found.model
    assert (model.vocab_size, model.context_tokens, model.rope_base) == (96, 32, 300.0)
    assert (model.kv_heads, model.tied_embeddings) == (6, True) if changes else (3, False)
    tokens_BT = torch.randint(0, 96, (3, 32))
    with torch.no_grad():
        due_BTV = theirs(tokens_BT).logits
        seen_BTV = forward(weights_of(found.weights_P, model), tokens_BT, model)
    assert float(due_BTV.abs().max()) > 1.0
    assert float((seen_BTV - due_BTV).abs().max()) < MOST_DIFFERENCE
    assert found.tokenizer_file is None


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_export_with_grouped_heads_is_the_same_in_transformers_and_comes_back(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM

    spec = msgspec.structs.replace(load_builtin_run("demo"), model=MODEL)
    weights_P = random_P(MODEL)
    store = BlobStore(tmp_path / "run" / "modules" / DENSE_MODULE / "blobs")
    state_hash = write_state(SharedState(weights_P=weights_P, momentum_P=-weights_P), store)
    into = tmp_path / "exported"
    export.export(tmp_path / "run", DENSE_MODULE, Provenance(spec, state_hash, 7), into)
    theirs = AutoModelForCausalLM.from_pretrained(into, dtype=torch.float32)
    theirs.train(False)
    tokens_BT = torch.randint(0, 256, (3, MODEL.context_tokens))
    with torch.no_grad():
        seen_BTV = theirs(tokens_BT).logits
        due_BTV = forward(weights_of(weights_P, MODEL), tokens_BT, MODEL)
    assert float(due_BTV.abs().max()) > 1.0
    assert float((seen_BTV - due_BTV).abs().max()) < MOST_DIFFERENCE
    found = read_huggingface(into)
    assert found.model == MODEL
    assert torch.equal(found.weights_P, weights_P)
    assert found.tokenizer_file == into / export.TOKENIZER_NAME


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_single(folder: Path, dtype: torch.dtype) -> None:
    named = load_file(folder / export.WEIGHTS_NAME)
    save_file(
        {name: tensor.to(dtype) for name, tensor in named.items()}, folder / export.WEIGHTS_NAME
    )
    assert torch.equal(read_huggingface(folder).weights_P, random_P(MODEL).to(dtype).float())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "positions are scaled"),
        ({"rope_parameters": [1]}, "no table"),
        ({"head_dim": 16}, "head_dim is 16, not 8"),
        ({"num_key_value_heads": 4}, "divide"),
        ({"hidden_size": "48"}, "hidden_size must be a whole number, not '48'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be a whole number <= 256"),
        ({"rope_theta": "far"}, "rope_theta must be a number"),
        ({"rms_norm_eps": 1e-6, "mlp_bias": True}, "mlp_bias is True.*rms_norm_eps"),
    ],
)
def test_what_no_run_can_have_is_refused(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    write_model(tmp_path, MODEL, **changes)
    with pytest.raises(VolunteerError, match=said):
        read_huggingface(tmp_path)


def test_a_config_of_another_kind_of_model_is_told_by_its_own_keys(tmp_path: Path) -> None:
    (tmp_path / export.CONFIG_NAME).write_text('{"model_type": "gpt2", "n_layer": 12}')
    with pytest.raises(VolunteerError, match="num_hidden_layers is missing") as refused:
        read_huggingface(tmp_path)
    assert "model_type is 'gpt2', not 'llama'" in str(refused.value)
    assert "$" not in str(refused.value)


def test_other_weights_than_the_configs_are_refused(folder: Path) -> None:
    file = folder / export.WEIGHTS_NAME
    named = load_file(file)
    norm = named["model.norm.weight"]
    for changed, said in [
        ({"model.norm.weight": norm[:-1].clone()}, r"\(47,\)"),
        ({"model.norm.weight": norm.to(torch.int32)}, "int32"),
        ({"model.norm.bias": norm.clone()}, "has model.norm.bias"),
        ({"model.norm.weight": norm * float("nan")}, "infinities"),
    ]:
        save_file({**named, **changed}, file)
        with pytest.raises(CheckpointCorruptError, match=said):
            read_huggingface(folder)
    del named["lm_head.weight"]
    save_file(named, file)
    with pytest.raises(CheckpointCorruptError, match=r"has no lm_head\.weight"):
        read_huggingface(folder)


def test_hostile_files_are_refused(folder: Path) -> None:
    weight_maps: list[object] = [{"a": "../elsewhere"}, {"a": 1}, [], {}, {"a": ["b"]}, {"a": {}}]
    for weight_map in [*weight_maps, {"a": "a\0b"}, {"a": "\ud800"}]:
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointCorruptError, match="names no files"):
            read_huggingface(folder)
    (folder / INDEX_NAME).unlink()
    (folder / export.WEIGHTS_NAME).write_bytes(b"\xff" * (2 * num_parameters(MODEL)))
    with pytest.raises(CheckpointCorruptError, match="no safetensors"):
        read_huggingface(folder)
    for width, said in [(4092, "too few for the"), (65520, "billion parameters")]:
        write_model(folder, MODEL, hidden_size=width, head_dim=None)
        with pytest.raises(VolunteerError, match=said):  # before memory is asked for
            read_huggingface(folder)
    for text in ("[" * 10000, "[]", "{", "\x00"):
        (folder / export.CONFIG_NAME).write_text(text)
        with pytest.raises(VolunteerError, match="cannot be read"):
            read_huggingface(folder)
    if hasattr(os, "mkfifo"):
        (folder / export.CONFIG_NAME).unlink()
        os.mkfifo(folder / export.CONFIG_NAME)
        with pytest.raises(VolunteerError, match="is no file"):  # and nobody waits for a writer
            read_huggingface(folder)
