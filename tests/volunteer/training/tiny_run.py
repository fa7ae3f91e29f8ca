"""A run small enough for tests, and the pieces that they train it with."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from volunteer.run import (
    CodecSpec,
    DataSpec,
    GenesisSpec,
    InnerSpec,
    ModelSpec,
    RunSpec,
)
from volunteer.training.data import load_corpus, training_windows
from volunteer.training.devices import Device
from volunteer.training.genesis import build_genesis, genesis_hash

CPU = Device(torch_device=torch.device("cpu"), name="CPU", autocast_dtype=None)


def tiny_spec(*, lr: float = 3e-3, warmup_steps: int = 4) -> RunSpec:
    """Return a run with 6,352 parameters and its true genesis hash."""
    spec = RunSpec(
        name="tiny",
        model=ModelSpec(num_layers=1, dim=16, num_heads=2, ffn_dim=24, context_tokens=16),
        genesis=GenesisSpec(seed=7, state_hash="0" * 64),
        data=DataSpec(sources=("builtin:milton",)),
        inner=InnerSpec(lr=lr, decay_rounds=50, batch_sequences=4, warmup_steps=warmup_steps),
        codec=CodecSpec(block_elements=256),
    )
    genesis = msgspec.structs.replace(spec.genesis, state_hash=genesis_hash(spec))
    return msgspec.structs.replace(spec, genesis=genesis)


def tiny_weights_P(spec: RunSpec, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the genesis weights, a fresh copy."""
    return build_genesis(spec).weights_P.to(dtype, copy=True)


def tiny_windows(spec: RunSpec, inner_step: int, peer_seed: bytes = b"seed") -> Tensor:
    """Return what an inner step reads, int64."""
    windows = training_windows(
        load_corpus(spec.data),
        run_id=spec.run_id,
        peer_seed=peer_seed,
        inner_step=inner_step,
        num_sequences=spec.inner.batch_sequences,
        context_tokens=spec.model.context_tokens,
    )
    return torch.from_numpy(windows).long()


def never() -> bool:
    """Stand in for `should_stop` where nobody stops."""
    return False
