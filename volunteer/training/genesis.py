"""The weights of round 0, the same on every machine that has the RunSpec.

Runs in: aggregator, import; packaging computes the hash that a RunSpec carries. Pure, but for
`make_genesis`. A run may also begin from weights that exist: those are not made here.

Parameter i reads bytes 8 i .. 8 i + 7 of a blake3 output stream keyed by the seed, as four unsigned
16-bit integers. Their centred sum is an integer below 2^18 with a bell-shaped distribution (cut at
3.46 standard deviations); one multiplication in fp64 and one cast to fp32 follow. torch's generator
is not used: its streams differ between versions and devices.

Standard deviation 0.02; the two matrices that write into the residual stream (wo, w2) have theirs
divided by sqrt(2 * num_layers), as in GPT-2. Gains of norms are 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from p2p.blobstore import BlobStore
from volunteer.errors import RunSpecError
from volunteer.run import RunSpec
from volunteer.training.layout import ParameterSlot, model_layout, num_parameters
from volunteer.training.state import SharedState, StateSlice, state_hash_of, write_state_slices

_CONTEXT = b"allmende/genesis-weights/1\x00"
_DRAW_BYTES = 8
_DRAWS = 4
_STD = 0.02
_SLICE_ELEMENTS = 2**20
# Variance of a uniform integer 0..n-1 is (n^2 - 1) / 12; four of them are added.
_DRAW_STD = math.sqrt(_DRAWS * (2**32 - 1) / 12)
_RESIDUAL_WRITERS = (".wo", ".w2")


def build_genesis(spec: RunSpec) -> SharedState:
    """Return the state of round 0; a function of the model's shape and the seed alone."""
    weights_P = torch.empty(num_parameters(spec.model), dtype=torch.float32)
    for piece in genesis_slices(spec):
        weights_P[piece.start : piece.start + len(piece.weights_S)] = piece.weights_S
    return SharedState(weights_P=weights_P, momentum_P=torch.zeros_like(weights_P))


def make_genesis(spec: RunSpec, store: BlobStore) -> str:
    """Put the state of round 0 into the store, and return its hash.

    Raises:
        RunSpecError: it is another one than the RunSpec states, or one that is not made.
        StorageFullError: no room; nothing is left behind.
    """
    state_hash = write_state_slices(genesis_slices(spec), num_parameters(spec.model), store)
    if state_hash != spec.genesis.state_hash:
        store.delete(state_hash)
        raise RunSpecError(
            f"the genesis that the RunSpec describes has the hash {state_hash}, "
            f"and it states {spec.genesis.state_hash}"
        )
    return state_hash


def write_given_genesis(weights_P: Tensor, store: BlobStore) -> str:
    """Put a state of these weights and no momentum into the store, and return its hash.

    Args:
        weights_P: fp32, shape (P,), on the CPU.
        store: where it goes.

    Raises:
        CheckpointCorruptError: an element is not finite.
        StorageFullError: no room; nothing is left behind.

    Cost: 8 P bytes of disk.
    """
    starts = range(0, len(weights_P), _SLICE_ELEMENTS)
    pieces = ((start, weights_P[start : start + _SLICE_ELEMENTS]) for start in starts)
    slices = (StateSlice(start, part_S, torch.zeros_like(part_S)) for start, part_S in pieces)
    return write_state_slices(slices, len(weights_P), store)


def verify_given_genesis(state: SharedState) -> None:
    """Check what the hash of a state that a run begins from cannot say.

    Raises:
        RunSpecError: it has momentum, so the first step would not be what is contributed.
    """
    if bool(torch.any(state.momentum_P)):
        raise RunSpecError("the state that the run begins from has outer momentum")


def genesis_hash(spec: RunSpec) -> str:
    """Return the state hash of round 0, for `spec.genesis.state_hash` (whose value is not used)."""
    return state_hash_of(genesis_slices(spec), num_parameters(spec.model))


def genesis_slices(spec: RunSpec) -> Iterator[StateSlice]:
    """Make the state of round 0 piece by piece, for models that should not lie in memory whole.

    Raises:
        RunSpecError: it is none that can be made.
    """
    if spec.genesis.is_given:
        raise RunSpecError("the run begins from weights that exist: they cannot be computed")
    for slot in model_layout(spec.model):
        scale = _scale(slot, spec.model.num_layers)
        for start in range(slot.offset, slot.end, _SLICE_ELEMENTS):
            stop = min(start + _SLICE_ELEMENTS, slot.end)
            weights_S = (
                torch.ones(stop - start) if slot.is_norm else _draw(spec, start, stop, scale)
            )
            yield StateSlice(start, weights_S, torch.zeros_like(weights_S))


def _scale(slot: ParameterSlot, num_layers: int) -> float:
    """Return the factor of the stream's integers; sqrt and / are exact to the last bit."""
    std = _STD / math.sqrt(2 * num_layers) if slot.name.endswith(_RESIDUAL_WRITERS) else _STD
    return std / _DRAW_STD


def _draw(spec: RunSpec, start: int, stop: int, scale: float) -> Tensor:
    integers_S = integer_stream(spec.genesis.seed, start, stop)
    return torch.from_numpy((integers_S.astype(np.float64) * scale).astype(np.float32))


def integer_stream(seed: int, start: int, stop: int) -> npt.NDArray[np.int32]:
    """Return elements start..stop of the stream: centred sums of four 16-bit integers."""
    hasher = blake3(_CONTEXT + seed.to_bytes(8, "little"))
    raw = hasher.digest(length=(stop - start) * _DRAW_BYTES, seek=start * _DRAW_BYTES)
    draws = np.frombuffer(raw, dtype="<u2").reshape(-1, _DRAWS)
    sums: npt.NDArray[np.int32] = draws.sum(axis=1, dtype=np.int32)
    return sums - _DRAWS * (2**16 - 1) // 2
