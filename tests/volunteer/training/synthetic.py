"""Small runs and reproducible vectors for the tests of the deterministic half of training."""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from volunteer.messages import ListedWork
from volunteer.run import (
    CodecSpec,
    DataSpec,
    EvaluationSpec,
    GenesisSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RunSpec,
)
from volunteer.training.compression_int4 import Int4Gradient, encode_int4
from volunteer.training.genesis import genesis_hash


def make_spec(
    *,
    dim: int = 8,
    block_elements: int = 0,
    seed: int = 7,
    outer: OuterSpec | None = None,
    codec_id: str = "int4",
) -> RunSpec:
    """Return a valid spec; with the defaults, P = 2520 in 158 blocks, so cosines are sampled."""
    is_sparse = codec_id == "topk2"
    spec = RunSpec(
        name="synthetic",
        model=ModelSpec(num_layers=1, dim=dim, num_heads=1, ffn_dim=8, context_tokens=8),
        genesis=GenesisSpec(seed=seed, state_hash="0" * 64),
        data=DataSpec(sources=("builtin:shakespeare",)),
        inner=InnerSpec(lr=1e-3, decay_rounds=10, batch_sequences=2),
        outer=outer or (OuterSpec(lr=1.0, momentum=0.0) if is_sparse else OuterSpec()),
        codec=make_codec(codec_id, block_elements),
        evaluation=EvaluationSpec(num_sequences=4),
    )
    genesis = GenesisSpec(seed=seed, state_hash=genesis_hash(spec))
    return msgspec.structs.replace(spec, genesis=genesis)


def make_codec(codec_id: str, block_elements: int = 0) -> CodecSpec:
    """Return a codec for small vectors; a sparse one takes each round another step of its ladder.

    Of `topk2`'s default blocks of 256 the first 64 are kept, written down as a bitmap, then 16.
    """
    if codec_id != "topk2":
        return CodecSpec(id=codec_id, block_elements=block_elements or 16)
    block_elements = block_elements or 256
    return CodecSpec(
        id=codec_id,
        block_elements=block_elements,
        error_feedback_beta=0.95,
        ladder_kept=(block_elements // 4, block_elements // 16, 8),
        ladder_rounds=(0, 1, 2),
    )


def gradient(label: str, num_elements: int, *, scale: float = 1e-3) -> Tensor:
    """Return a reproducible fp32 vector, uniform in -scale..scale, from blake3 of `label`."""
    raw = blake3(b"synthetic/" + label.encode()).digest(length=2 * num_elements)
    integers = np.frombuffer(raw, dtype="<i2").astype(np.float64)
    return torch.from_numpy((integers * (scale / 2**15)).astype(np.float32))


def encoded(x_P: Tensor, block_elements: int = 16) -> Int4Gradient:
    """Encode in int4 with blocks of the given size."""
    return encode_int4(x_P, CodecSpec(block_elements=block_elements))


def work(
    index: int,
    *,
    tokens: int = 1000,
    author: str = "",
    is_late: bool = False,
    is_on_probation: bool = False,
) -> ListedWork:
    """Return the listing of contribution `index`, each by an author of its own unless told."""
    return ListedWork(
        contribution_id=f"{index:064x}",
        author=author or f"peer-{index}",
        round_index=0,
        blob_id=f"{index + 1000:064x}",
        tokens=tokens,
        is_late=is_late,
        is_on_probation=is_on_probation,
    )
