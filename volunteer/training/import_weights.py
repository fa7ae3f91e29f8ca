"""Reads a model of Hugging Face's form, so that a run can begin from weights that exist.

Runs in: a process of its own. The other way round of export.py: `LlamaForCausalLM`, with or without
fewer key heads and an output matrix of its own, in fp32, fp16 or bfloat16, in one file or several.
What a run's model cannot be (biases, scaled positions, another epsilon) is refused, not ignored.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from p2p.blobstore import MAX_BLOB_BYTES
from volunteer.errors import CheckpointCorruptError, VolunteerError
from volunteer.run import ModelSpec
from volunteer.spec_problems import problems_of
from volunteer.training.blob_format import MAX_HEADER_BYTES
from volunteer.training.export import (
    CONFIG_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    hugging_face_name,
)
from volunteer.training.finite import is_finite
from volunteer.training.layout import model_layout, num_parameters
from volunteer.training.model import NORM_EPSILON

INDEX_NAME: Final = "model.safetensors.index.json"
_OUTPUT_NAME: Final = "lm_head.weight"
_MAX_JSON_BYTES: Final = 16 * 1024 * 1024
_LEAST_ITEM_BYTES: Final = 2
_STATE_ITEM_BYTES: Final = 8
"""fp32 weights and momentum."""
_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)
_FIELDS: Final = {
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "context_tokens": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
_BESIDE: Final = {
    "num_kv_heads": "num_key_value_heads",
    "rope_base": "rope_theta",
    "tied_embeddings": "tie_word_embeddings",
}
_DEFAULT_ROPE_BASE: Final = 10000.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImportedModel:
    """What a folder held."""

    model: ModelSpec
    weights_P: Tensor
    """fp32, shape (P,), on the CPU."""
    tokenizer_file: Path | None
    """Its tokenizer.json; None: it has none."""


def read_huggingface(folder: Path) -> ImportedModel:
    """Read a folder as `save_pretrained` or `allmende export` writes it.

    Args:
        folder: hostile.

    Raises:
        VolunteerError: it is no such folder, or its model is none that a run can have.
        CheckpointCorruptError: the weights are not those of its config, or are not finite.
        OSError: it cannot be read.

    Cost: 4 P bytes, and the largest tensor of the files.
    """
    model = model_of_config(_read_json(folder / CONFIG_NAME))
    files = _weight_files(folder)
    _verify_size(num_parameters(model), files)
    weights_P = torch.empty(num_parameters(model))
    slots = {hugging_face_name(slot): slot for slot in model_layout(model)}
    missing = set(slots)
    for file in files:
        for name, tensor in _tensors_of(file):
            if name == _OUTPUT_NAME and model.tied_embeddings:
                continue  # the library may write what is tied twice
            if name not in missing:
                raise CheckpointCorruptError(f"{file.name} has {name}, which this model has not")
            slot = slots[name]
            if tuple(tensor.shape) != slot.shape or tensor.dtype not in _DTYPES:
                raise CheckpointCorruptError(
                    f"{file.name}: {name} is {tensor.dtype} of {tuple(tensor.shape)},"
                    f" not numbers of {slot.shape}"
                )
            weights_P[slot.offset : slot.end] = tensor.flatten().float()
            missing.remove(name)
    if missing:
        raise CheckpointCorruptError(f"{folder} has no {min(missing)}")
    if not is_finite(weights_P):
        raise CheckpointCorruptError(f"{folder} holds infinities or not-a-numbers")
    tokenizer_file = folder / TOKENIZER_NAME
    return ImportedModel(
        model=model,
        weights_P=weights_P,
        tokenizer_file=tokenizer_file if tokenizer_file.is_file() else None,
    )


def _verify_size(num: int, files: Iterable[Path]) -> None:
    """Check that there may be so many parameters, before memory is asked for them.

    Raises:
        VolunteerError: no state of a run could hold them.
        CheckpointCorruptError: the files cannot.
        OSError: one cannot be read.
    """
    if _STATE_ITEM_BYTES * num > MAX_BLOB_BYTES - MAX_HEADER_BYTES:
        raise VolunteerError(
            f"it has {num / 1e9:.1f} billion parameters: a run's state has at most"
            f" {MAX_BLOB_BYTES / 1e9:.1f} GB, {_STATE_ITEM_BYTES} bytes a parameter",
            hint="import a smaller model",
        )
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes < _LEAST_ITEM_BYTES * num:
        raise CheckpointCorruptError(
            f"its weights have {num_bytes} bytes, too few for the {num:,} parameters of its config",
            hint="fetch the folder again, all of it",
        )


def model_of_config(config: Mapping[str, Any]) -> ModelSpec:
    """Return the shape that a config.json tells of.

    Raises:
        VolunteerError: it is none that a run can have; every problem is named.
    """
    problems = list(_differences(config))
    problems += [f"{key} is missing" for key in _FIELDS.values() if config.get(key) is None]
    present = {ours: config.get(theirs) for ours, theirs in _FIELDS.items()}
    shape = {key: value for key, value in present.items() if value is not None} | {
        "num_kv_heads": config.get("num_key_value_heads") or 0,
        "rope_base": _rope(config).get("rope_theta", _DEFAULT_ROPE_BASE),
        "tied_embeddings": config.get("tie_word_embeddings", False),
    }
    said = problems_of(shape, ModelSpec, "")
    problems += [_in_their_words(one) for one in said if not one.endswith(" is missing")]
    if problems:
        raise _refusal(problems)
    model = msgspec.convert(shape, ModelSpec)
    if model.num_kv_heads == model.num_heads:
        model = msgspec.structs.replace(model, num_kv_heads=0)
    if model.dim % (2 * model.num_heads) or model.num_heads % model.kv_heads:
        problems.append("its heads do not divide its width")
    elif config.get("head_dim") not in (None, model.head_dim):
        problems.append(f"head_dim is {config['head_dim']}, not {model.head_dim}")
    if problems:
        raise _refusal(problems)
    return model


def _differences(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what about a config no model of a run can be."""
    expected = {
        "model_type": ("llama",),
        "hidden_act": (None, "silu"),
        "attention_bias": (None, False),
        "mlp_bias": (None, False),
        "rms_norm_eps": (NORM_EPSILON,),
    }
    for key, allowed in expected.items():
        if config.get(key) not in allowed:
            yield f"{key} is {config.get(key)!r}, not {allowed[-1]!r}"
    kind = _rope(config).get("rope_type", _rope(config).get("type", "default"))
    if kind != "default":
        yield f"positions are scaled ({kind!r})"


def _in_their_words(said: str) -> str:
    """Return what is said of a key of ours as said of the key that config.json has for it."""
    ours, _, rest = said.partition(" ")
    return f"{(_FIELDS | _BESIDE)[ours]} {rest}"


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is said of positions: beside all else, or in a table of its own since v5."""
    own = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(own, dict):
        raise _refusal(["rope_parameters is no table"])
    beside = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    return {**beside, **own}


def _refusal(problems: list[str]) -> VolunteerError:
    return VolunteerError(
        f"{CONFIG_NAME} is of a model that no run can have: {'; '.join(problems)}",
        hint="LlamaForCausalLM without biases, with plain rotary positions, can be",
    )


def _weight_files(folder: Path) -> tuple[Path, ...]:
    if not (folder / INDEX_NAME).exists():
        return (folder / WEIGHTS_NAME,)
    weight_map = _read_json(folder / INDEX_NAME).get("weight_map")
    named = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not named or not all(map(_is_file_name, named)):
        raise CheckpointCorruptError(f"{INDEX_NAME} names no files of this folder")
    return tuple(folder / name for name in sorted(set(named)))


def _is_file_name(name: object) -> bool:
    """Tell whether a stranger has named a file of the same folder, and none with a NUL in it."""
    return isinstance(name, str) and PurePath(name).name == name and name.isprintable()


def _tensors_of(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 -- it is no mapping
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise CheckpointCorruptError(f"{file.name} is no safetensors file: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    if stat.S_ISFIFO(file.stat().st_mode):
        raise VolunteerError(f"{file} is no file")  # to open it would wait for ever
    with file.open("rb") as stream:
        text = stream.read(_MAX_JSON_BYTES + 1)
    try:
        if len(text) > _MAX_JSON_BYTES:
            raise ValueError(f"larger than {_MAX_JSON_BYTES} bytes")
        content = json.loads(text)
        if not isinstance(content, dict):
            raise TypeError("no table")
    except (ValueError, TypeError, RecursionError) as error:
        raise VolunteerError(f"{file} cannot be read: {error}") from error
    return content
