"""Writes the shared weights as a model that Hugging Face's libraries load, and reads it back.

    python -m volunteer.training.export --run-dir DIR --state-hash HASH --into DIR

Runs in: a process of its own, for `allmende export`. The model is Llama's: RMSNorm before attention
and SwiGLU, rotary positions that turn i with i + head_dim / 2, no biases; only the names differ.
Where tokens are bytes, the tokenizer file says so in the form of a byte-level BPE without merges.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from p2p.blobstore import BlobStore, is_blob_id
from p2p.errors import P2PError
from volunteer.errors import CheckpointCorruptError, VolunteerError
from volunteer.files import fsync_dir, fsync_file, replace_file, telling_full_disk
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import ModelSpec, RunSpec, read_run_spec
from volunteer.training.child_process import lower_priority
from volunteer.training.layout import ParameterSlot, model_layout, num_parameters
from volunteer.training.model import NORM_EPSILON
from volunteer.training.state import read_state
from volunteer.training.tokenizer import tokenizer_file
from volunteer.training.verb_failure import tell_failure

WEIGHTS_NAME: Final = "model.safetensors"
CONFIG_NAME: Final = "config.json"
TOKENIZER_NAME: Final = "tokenizer.json"
TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"
CARD_NAME: Final = "README.md"
_FILE_MODE: Final = 0o644
_NICENESS: Final = 19
_OUTSIDE: Final = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "output": "lm_head.weight",
}
_OF_LAYER: Final = {
    "attention_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "w1": "mlp.gate_proj",
    "w3": "mlp.up_proj",
    "w2": "mlp.down_proj",
}
_BYTE_LEVEL: Final = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": False,
    "use_regex": False,
}


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where exported weights come from."""

    spec: RunSpec
    state_hash: str
    round_index: int


def export(run_dir: Path, module_id: str, origin: Provenance, folder: Path) -> None:
    """Write a state of a run into `folder`, and read it back.

    A kill leaves each file as it was or new; the weights come last.

    Args:
        run_dir: the run's folder.
        module_id: of the module.
        origin: what is exported.
        folder: made if need be; earlier exports in it are replaced, other files are left alone.

    Raises:
        CheckpointCorruptError: the state on the disk is damaged, or what was written differs.
        DataUnavailableError: the run's tokenizer is not here yet.
        VolunteerError: the state is not here, or the folder cannot be written.
        OSError: it cannot be read.

    Cost: 4 P bytes of disk, page cache only.
    """
    model = origin.spec.model
    store = BlobStore(run_dir / "modules" / module_id / "blobs")
    if not is_blob_id(origin.state_hash) or not store.has(origin.state_hash):
        raise VolunteerError(
            "the shared weights are not on this disk just now",
            hint="they are being made or fetched: `allmende status` says how far they are",
        )
    if not store.verify(origin.state_hash):
        raise CheckpointCorruptError(
            "the shared weights are damaged on this disk",
            hint="export again when the round has closed: those are written anew",
        )
    weights_P = read_state(store.file_of(origin.state_hash), num_parameters(model)).weights_P
    make_folder(folder)
    _replace_json(folder / CONFIG_NAME, config_of(model))
    tokenizer = tokenizer_file(origin.spec, store)
    if tokenizer is None:
        _replace_json(folder / TOKENIZER_NAME, byte_tokenizer())
    else:
        replace_file(folder / TOKENIZER_NAME, tokenizer, mode=_FILE_MODE)
    _replace_json(folder / TOKENIZER_CONFIG_NAME, tokenizer_config(model))
    replace_file(folder / CARD_NAME, model_card(origin).encode(), mode=_FILE_MODE)
    write_weights(folder / WEIGHTS_NAME, weights_P, model)
    if not torch.equal(read_weights(folder / WEIGHTS_NAME, model), weights_P):
        raise CheckpointCorruptError(
            f"{folder / WEIGHTS_NAME} does not read as it was written", hint="export again"
        )


def hugging_face_name(slot: ParameterSlot) -> str:
    """Return what a parameter is called in `LlamaForCausalLM`."""
    if slot.name in _OUTSIDE:
        return _OUTSIDE[slot.name]
    _, index, part = slot.name.split(".")
    return f"model.layers.{index}.{_OF_LAYER[part]}.weight"


def write_weights(file: Path, weights_P: Tensor, model: ModelSpec) -> None:
    """Write the weights under Hugging Face's names; a kill leaves the old file or the new.

    Args:
        file: where.
        weights_P: fp32, shape (P,), on the CPU.
        model: their shape.

    Raises:
        OSError: it cannot be written, as on a full disk; the old file is untouched.
    """
    array_P = weights_P.numpy()
    named = {
        hugging_face_name(slot): array_P[slot.offset : slot.end].reshape(slot.shape)
        for slot in model_layout(model)
    }
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        save_file(named, temporary, metadata={"format": "pt"})
        fsync_file(temporary)
        temporary.chmod(_FILE_MODE)
        temporary.replace(file)
    except SafetensorError as error:
        raise _system_error(error, temporary) from error
    finally:
        temporary.unlink(missing_ok=True)
    fsync_dir(file.parent)


def _system_error(error: SafetensorError, file: Path) -> OSError:
    """Return what the system said; the library tells it in words: `... (os error 28)`."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is None:
        return OSError(errno.EIO, str(error), str(file))
    return OSError(int(found[1]), os.strerror(int(found[1])), str(file))


def read_weights(file: Path, model: ModelSpec) -> Tensor:
    """Read what `write_weights` or a library has written, as one flat vector.

    Args:
        file: hostile; where the output is tied it may have it nonetheless.
        model: the shape it should have.

    Returns:
        weights_P, fp32, shape (P,), on the CPU.

    Raises:
        CheckpointCorruptError: it is no such file, or of another shape or dtype.
        OSError: it cannot be read.
    """
    weights_P = torch.empty(num_parameters(model))
    try:
        with safe_open(file, framework="numpy") as opened:
            names = set(opened.keys())
            if model.tied_embeddings:
                names.discard(_OUTSIDE["output"])  # the library may write what is tied twice
            for slot in model_layout(model):
                name = hugging_face_name(slot)
                if name not in names:
                    raise CheckpointCorruptError(f"{file.name} has no {name}")
                names.remove(name)
                array = opened.get_tensor(name)
                if array.shape != slot.shape or array.dtype != np.float32:
                    raise CheckpointCorruptError(
                        f"{file.name}: {name} is {array.dtype} of {array.shape},"
                        f" not float32 of {slot.shape}"
                    )
                weights_P[slot.offset : slot.end] = torch.from_numpy(array).flatten()
    except SafetensorError as error:
        raise CheckpointCorruptError(f"{file.name} is no safetensors file: {error}") from error
    if names:
        raise CheckpointCorruptError(f"{file.name} has more than this model: {min(names)}")
    return weights_P


def config_of(model: ModelSpec) -> dict[str, Any]:
    """Return config.json of a model."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context_tokens,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": model.rope_base,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model.tied_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def byte_tokenizer() -> dict[str, Any]:
    """Return tokenizer.json of a tokenizer whose tokens are bytes, numbered by their value."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _BYTE_LEVEL,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(zip(_byte_letters(), range(256), strict=True)),
            "merges": [],
        },
    }


def tokenizer_config(model: ModelSpec) -> dict[str, Any]:
    """Return tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.context_tokens,
        "clean_up_tokenization_spaces": False,
    }


def _byte_letters() -> Iterator[str]:
    """Yield the printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    num_shifted = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            yield chr(byte)
        else:
            yield chr(256 + num_shifted)
            num_shifted += 1


def model_card(origin: Provenance) -> str:
    """Return README.md: what the weights are, and where they come from."""
    spec = origin.spec
    tokens_are = "tokens are bytes" if spec.data.tokenizer == "bytes" else "tokenizer.json beside"
    return (
        f"# {spec.name}, round {origin.round_index}\n\n"
        f"{spec.description}\n\n"
        f"- Run: `{spec.run_id}`\n- State hash: `{origin.state_hash}`\n"
        f"- Parameters: {num_parameters(spec.model):,}; {tokens_are}\n"
        f"- Licence: {spec.licence or 'the run names none'}\n\n"
        "Trained by volunteers with Allmende. With Hugging Face's transformers:\n\n"
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".")\n'
        'tokenizer = AutoTokenizer.from_pretrained(".")\n'
        "```\n"
    )


def make_folder(folder: Path) -> None:
    """Make the folder for an export.

    Raises:
        VolunteerError: it cannot be made, or holds another model.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config_file = folder / CONFIG_NAME
        if config_file.exists() and not (folder / CARD_NAME).exists():
            raise VolunteerError(f"{folder} holds another model", hint="name another folder")
    except OSError as error:
        raise VolunteerError(
            f"{folder} cannot be made: {error.strerror}", hint="name another folder"
        ) from error


def _replace_json(file: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    replace_file(file, text.encode(), mode=_FILE_MODE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Export; return the exit status."""
    parser = argparse.ArgumentParser(prog="export", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--module", default=DENSE_MODULE)
    parser.add_argument("--state-hash", required=True)
    parser.add_argument("--round-index", type=int, required=True)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args(arguments)
    lower_priority(_NICENESS)
    torch.set_num_threads(1)
    try:
        spec = read_run_spec(options.run_dir / "spec.toml")
        origin = Provenance(spec, options.state_hash, options.round_index)
        with telling_full_disk(options.into):
            export(options.run_dir, options.module, origin, options.into)
    except (VolunteerError, P2PError, OSError) as error:
        return tell_failure(error, options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
