"""The shared state, and its file: what the state hash is the hash of.

Runs in: aggregator (writes), trainer (reads). Stage 5 of a round.

The file is safetensors in canonical form (blob_format.py): "momentum_P" and "weights_P", F32. Its
blob id is the state hash, so a newcomer verifies it chunk by chunk, and whoever holds it can serve
it. It is written as a stream of slices, so that a large model needs no second copy in memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from p2p.blobstore import BlobStore, blob_id_of_file
from p2p.errors import BlobStoreFullError
from volunteer.errors import CheckpointCorruptError, StorageFullError, StorageReadOnlyError
from volunteer.files import drop_from_cache
from volunteer.training.blob_format import (
    MAX_HEADER_BYTES,
    TensorEntry,
    describe_difference,
    file_bytes,
    header_bytes,
)
from volunteer.training.finite import is_finite

FORMAT = "allmende/state/1"
_ITEM_BYTES = 4
_SLICE_ELEMENTS = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedState:
    """What all members of a run's module hold alike after a commit."""

    weights_P: Tensor
    """G, fp32, shape (P,), CPU."""
    momentum_P: Tensor
    """m of the outer optimizer, fp32, shape (P,), CPU."""


@dataclass(frozen=True, slots=True, eq=False)
class StateSlice:
    """Elements start.. of a state that is being made."""

    start: int
    weights_S: Tensor
    momentum_S: Tensor


def state_slices(state: SharedState) -> Iterable[StateSlice]:
    """Cut a whole state into slices, for `write_state_slices`."""
    for start in range(0, len(state.weights_P), _SLICE_ELEMENTS):
        stop = start + _SLICE_ELEMENTS
        yield StateSlice(start, state.weights_P[start:stop], state.momentum_P[start:stop])


def write_state(state: SharedState, store: BlobStore) -> str:
    """Put `state` into the store, durably, and return its hash.

    Raises:
        CheckpointCorruptError: an element is not finite: such a state must not come to be.
        StorageFullError: no room; nothing is left behind.
    """
    return write_state_slices(state_slices(state), len(state.weights_P), store)


def write_state_slices(
    slices: Iterable[StateSlice],
    num_parameters: int,
    store: BlobStore,
    *,
    instead_of: Path | None = None,
) -> str:
    """Put a state into the store while it is being made (arguments and errors: `write_state`).

    Args:
        slices: in any order; together they cover 0..num_parameters once.
        num_parameters: P.
        store: where it goes; the file is made in its folder, synced, and renamed.
        instead_of: a state that nobody will read soon: what is written takes its place in memory.

    Raises:
        StorageFullError: no room; nothing is left behind.
    """
    # The store removes files of this form whose process is gone (p2p/blobstore.py).
    file = store.directory / f".tmp-{os.getpid()}-{secrets.token_hex(6)}"
    try:
        with _full_disk_is_typed():
            _write_file(file, slices, num_parameters, instead_of)
            return store.adopt_file(file)
    finally:
        file.unlink(missing_ok=True)


def state_hash_of(slices: Iterable[StateSlice], num_parameters: int) -> str:
    """Return the hash that a state has, without keeping it. Cost: 8 P bytes of temporary disk."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "state"
        _write_file(file, slices, num_parameters)
        return blob_id_of_file(file)


def read_state(file: Path, num_parameters: int, *, is_known_finite: bool = False) -> SharedState:
    """Memory-map a state file. The tensors are private: writing to them leaves the file alone.

    The file must not change while they are in use; files in a BlobStore never do.

    Args:
        file: hostile until its hash is known to be the chain's.
        num_parameters: P of the run's model.
        is_known_finite: the same bytes were found so before: they are not looked at.

    Raises:
        CheckpointCorruptError: another size, header or layout than is due, or not finite.
        OSError: it cannot be read.

    Cost: one read of the file, page cache only.
    """
    header = _header(num_parameters)
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        beginning = stream.read(MAX_HEADER_BYTES)
    if beginning[: len(header)] != header:
        difference = describe_difference(beginning, _metadata(num_parameters))
        raise CheckpointCorruptError(f"{file.name} is not a state of this run: {difference}")
    if size_bytes != file_bytes(header, _entries(num_parameters)):
        raise CheckpointCorruptError(f"{file.name} has {size_bytes} bytes, which is not its size")
    data = np.memmap(file, dtype="<f4", mode="c", offset=len(header), shape=(2 * num_parameters,))
    both = torch.from_numpy(data.astype(np.float32, copy=False))
    state = SharedState(weights_P=both[num_parameters:], momentum_P=both[:num_parameters])
    for piece in () if is_known_finite else state_slices(state):
        _verify_finite(piece)
    return state


def _metadata(num_parameters: int) -> dict[str, str]:
    return {"format": FORMAT, "num_parameters": str(num_parameters)}


def _entries(num_parameters: int) -> tuple[TensorEntry, TensorEntry]:
    return (
        TensorEntry("momentum_P", "F32", (num_parameters,)),
        TensorEntry("weights_P", "F32", (num_parameters,)),
    )


def _header(num_parameters: int) -> bytes:
    return header_bytes(_metadata(num_parameters), _entries(num_parameters))


def _verify_finite(piece: StateSlice) -> None:
    for tensor in (piece.weights_S, piece.momentum_S):
        if not is_finite(tensor):
            raise CheckpointCorruptError(f"the state is not finite at or after {piece.start}")


def _write_file(
    file: Path,
    slices: Iterable[StateSlice],
    num_parameters: int,
    instead_of: Path | None = None,
) -> None:
    header = _header(num_parameters)
    num_written = 0
    with file.open("xb") as stream:
        stream.write(header)
        for piece in slices:
            _verify_finite(piece)
            if instead_of is not None:
                # Each slice has two places, so twice as much goes from the front.
                end = 2 * (piece.start + len(piece.weights_S)) * _ITEM_BYTES
                drop_from_cache(instead_of, end)
            momentum_at = len(header) + piece.start * _ITEM_BYTES
            _write_at(stream, momentum_at, piece.momentum_S)
            _write_at(stream, momentum_at + num_parameters * _ITEM_BYTES, piece.weights_S)
            num_written += len(piece.weights_S)
    if num_written != num_parameters:
        raise ValueError(
            f"slices of {num_written} elements do not make a state of {num_parameters}"
        )


@contextlib.contextmanager
def _full_disk_is_typed() -> Iterator[None]:
    try:
        yield
    except BlobStoreFullError as error:
        raise StorageFullError(str(error), hint=error.hint) from error
    except OSError as error:
        if error.errno in (errno.EROFS, errno.EIO):
            raise StorageReadOnlyError(
                f"the shared state cannot be written: {error.strerror}"
            ) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StorageFullError(f"no room for the shared state: {error.strerror}") from error


def _write_at(stream: BinaryIO, offset: int, tensor_S: Tensor) -> None:
    stream.seek(offset)
    stream.write(tensor_S.contiguous().numpy().astype("<f4", copy=False).data)
