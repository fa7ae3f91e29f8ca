"""What a contribution changes, on the disk before anyone hears of it: E and the counters.

Runs in: trainer. Stage 3 of a round.

A snapshot has five vectors; a contribution changes what is in them in one way only: the work is in
the blob now, what the codec could not express is E, and the displacement P - theta is zero. So a
note of E and `Progress`, a fifth of the bytes or none of them where E is zero (fp32), makes an
older snapshot as good as a new one, and the contribution is announced a second earlier. Whoever
starts from a snapshot and its note stands on the shared weights, with nothing sent twice.

The note says which snapshot it belongs to, and means nothing beside another.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from volunteer.checkpoint.store import CheckpointStore
from volunteer.errors import CheckpointError, CheckpointTooNewError
from volunteer.training.blob_format import TensorEntry, file_bytes, header_bytes
from volunteer.training.progress import Progress

FORMAT_VERSION = 1
_FORMAT = "allmende/contribution-note/1"


class _Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest keeps beside E."""

    format_version: int
    snapshot: str
    """Fingerprint of the progress of the snapshot that the note belongs to."""
    progress: Progress
    has_residual: bool
    """Whether the payload holds E; otherwise E is zero."""


class ContributionNotes:
    """The newest note of one module of one run. One thread at a time."""

    def __init__(self, directory: Path, num_parameters: int) -> None:
        """Use `directory`, which is created when first written to."""
        self._checkpoints = CheckpointStore(directory, keep=1)
        self._num_parameters = num_parameters

    def save(self, residual_P: Tensor, progress: Progress, *, snapshot: Progress) -> None:
        """Put a note on the disk; once this returns, a kill cannot take it.

        Args:
            residual_P: E after the contribution, fp32, shape (P,), CPU.
            progress: after the contribution.
            snapshot: progress of the latest snapshot on the disk.

        Raises:
            StorageFullError: the note before still stands.

        Cost: 4 P bytes of disk, written once and read once; next to nothing where E is zero.
        """
        has_residual = any(residual_P.aminmax())
        metadata = _Metadata(
            format_version=FORMAT_VERSION,
            snapshot=_fingerprint(snapshot),
            progress=progress,
            has_residual=has_residual,
        )

        def write(file: Path) -> None:
            with file.open("xb") as stream:
                stream.write(_header(self._entries(has_residual)))
                if has_residual:
                    stream.write(residual_P.numpy().astype("<f4", copy=False).data)

        self._checkpoints.save(write, msgspec.to_builtins(metadata))

    def load(self, snapshot: Progress) -> tuple[Progress, Tensor] | None:
        """Return progress and E of the note that belongs to `snapshot`, or None.

        The progress stands on no commit: its weights are the snapshot's, which may be older.

        Raises:
            CheckpointTooNewError: a newer version wrote it.
            CheckpointError: it is whole, but none of ours.
        """
        loaded = self._checkpoints.load()
        if loaded is None:
            return None
        try:
            metadata = msgspec.convert(loaded.metadata, _Metadata)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the note's manifest is malformed: {error}") from error
        if metadata.format_version > FORMAT_VERSION:
            raise CheckpointTooNewError
        if metadata.snapshot != _fingerprint(snapshot):
            return None
        residual_P = self._read(loaded.payload_file, has_residual=metadata.has_residual)
        return msgspec.structs.replace(metadata.progress, base_commit=""), residual_P

    def _entries(self, has_residual: bool) -> tuple[TensorEntry, ...]:
        return (TensorEntry("residual", "F32", (self._num_parameters,)),) if has_residual else ()

    def _read(self, file: Path, *, has_residual: bool) -> Tensor:
        entries = self._entries(has_residual)
        header = _header(entries)
        with file.open("rb") as stream:
            beginning = stream.read(len(header))
        if beginning != header or file.stat().st_size != file_bytes(header, entries):
            raise CheckpointError(f"{file} is a note of another model")
        if not has_residual:
            return torch.zeros(self._num_parameters, dtype=torch.float32)
        array = np.fromfile(file, dtype="<f4", offset=len(header))
        return torch.from_numpy(array.astype(np.float32, copy=False))


def _header(entries: tuple[TensorEntry, ...]) -> bytes:
    return header_bytes({"format": _FORMAT}, entries)


def _fingerprint(progress: Progress) -> str:
    return hashlib.sha256(msgspec.json.encode(progress)).hexdigest()
