"""Snapshots: all that a volunteer's training consists of, as files that survive a power cut.

Runs in: trainer.

theta, P, E and both moments of the inner optimizer (fp32, canonical safetensors), its name and
`Progress` (in the manifest) go into one checkpoint; checkpoint/FORMAT.md says what a kill leaves.
Training resumed from a snapshot goes on bit for bit as if it had not stopped, on a CPU with the
same number of threads: what else it depends on (data, learning rate) is a function of `Progress`
and the RunSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from volunteer.checkpoint.store import CheckpointStore
from volunteer.errors import CheckpointCorruptError, CheckpointError, CheckpointTooNewError
from volunteer.run import RunSpec
from volunteer.training.adamw import AdamState
from volunteer.training.blob_format import TensorEntry, file_bytes, header_bytes
from volunteer.training.contribution_note import ContributionNotes
from volunteer.training.devices import Device
from volunteer.training.diloco import LocalState
from volunteer.training.layout import num_parameters
from volunteer.training.model import TrainableWeights
from volunteer.training.progress import Progress

FORMAT_VERSION = 1
_FORMAT = "allmende/snapshot/1"
_NOTES_NAME = "contributed"
_VECTORS = ("theta", "base", "residual", "adam_mean", "adam_square")


class _Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest keeps beside the tensors."""

    format_version: int
    run_id: str
    module_id: str
    progress: Progress
    optimizer: str = "adamw"
    """Whose moments these are; with `muon` the mean is its momentum where a matrix of a hidden
    layer lies. Snapshots of before there were two do not say."""


class _Version(msgspec.Struct):
    format_version: int


class SnapshotStore:
    """The snapshots of one module of one run. One thread at a time."""

    def __init__(self, directory: Path, spec: RunSpec, module_id: str) -> None:
        """Use `directory`, which is created when first written to."""
        self._checkpoints = CheckpointStore(directory)
        self._run_id = spec.run_id
        self._module_id = module_id
        self._model = spec.model
        self._optimizer = spec.inner.optimizer
        num = num_parameters(spec.model)
        self._num_parameters = num
        self._entries = tuple(TensorEntry(name, "F32", (num,)) for name in _VECTORS)
        self._header = header_bytes({"format": _FORMAT}, self._entries)
        self._notes = ContributionNotes(directory / _NOTES_NAME, num)
        self._latest: Progress | None = None
        """Of the latest snapshot on the disk."""

    def save(self, state: LocalState) -> None:
        """Put `state` on the disk; once this returns, a kill cannot take it.

        Raises:
            StorageFullError: the previous snapshot is still the latest.
            CheckpointTooNewError: the folder belongs to a newer version.

        Cost: 20 P bytes of disk, written once and read once; one vector at a time on the CPU.
        """
        metadata = _Metadata(
            format_version=FORMAT_VERSION,
            run_id=self._run_id,
            module_id=self._module_id,
            progress=state.progress,
            optimizer=self._optimizer,
        )
        self._checkpoints.save(
            lambda file: self._write_vectors(file, state), msgspec.to_builtins(metadata)
        )
        self._latest = state.progress

    def save_contribution(self, state: LocalState) -> None:
        """Put on the disk what a contribution has just changed (contribution_note.py).

        A kill then costs no more than the steps since the latest snapshot would have: their work is
        in the contribution.

        Raises:
            StorageFullError: what was there before still stands.

        Cost: 4 P bytes at most; a whole snapshot where there is none yet.
        """
        if self._latest is None:
            self.save(state)
        else:
            self._notes.save(state.residual_P, state.progress, snapshot=self._latest)

    def load(self, device: Device) -> LocalState | None:
        """Return the latest snapshot that is whole, with its note; None where there is none.

        A damaged one is put into quarantine and the one before it is used.

        Raises:
            CheckpointTooNewError: a newer version wrote it.
            CheckpointCorruptError: whole, but not a snapshot of ours.
            CheckpointError: it belongs to another run, module or model.
        """
        state = self._load_snapshot(device)
        self._latest = None if state is None else state.progress
        note = None if state is None else self._notes.load(state.progress)
        if state is not None and note is not None:
            state.progress, state.residual_P = note
            state.base_P = state.theta_P.clone()  # the displacement is in the contribution
        return state

    def _load_snapshot(self, device: Device) -> LocalState | None:
        loaded = self._checkpoints.load()
        if loaded is None:
            return None
        metadata = self._parse_metadata(loaded.metadata)
        vectors = self._read_vectors(loaded.payload_file)

        def on_device(name: str) -> Tensor:
            return vectors[name].to(device.torch_device, copy=True)

        return LocalState(
            weights=TrainableWeights(on_device("theta"), self._model),
            adam=AdamState(on_device("adam_mean"), on_device("adam_square")),
            base_P=vectors["base"].clone(),
            residual_P=vectors["residual"].clone(),
            progress=metadata.progress,
        )

    def _write_vectors(self, file: Path, state: LocalState) -> None:
        sources: tuple[Callable[[], Tensor], ...] = (
            lambda: state.weights.weights_P,
            lambda: state.base_P,
            lambda: state.residual_P,
            lambda: state.adam.mean_P,
            lambda: state.adam.square_P,
        )
        with file.open("xb") as stream:
            stream.write(self._header)
            for source in sources:
                vector_P = source().cpu()
                assert vector_P.dtype == torch.float32
                stream.write(vector_P.numpy().astype("<f4", copy=False).data)

    def _read_vectors(self, file: Path) -> Mapping[str, Tensor]:
        """Memory-map the vectors; the hash of the file was verified."""
        size_bytes = file.stat().st_size
        with file.open("rb") as stream:
            header = stream.read(len(self._header))
        if header != self._header or size_bytes != file_bytes(self._header, self._entries):
            raise CheckpointError(f"{file} is a snapshot of another model")
        num = self._num_parameters
        shape = (len(_VECTORS), num)
        mapped = np.memmap(file, dtype="<f4", mode="c", offset=len(header), shape=shape)
        rows = torch.from_numpy(mapped.astype(np.float32, copy=False))
        return dict(zip(_VECTORS, rows, strict=True))

    def _parse_metadata(self, plain: Mapping[str, Any]) -> _Metadata:
        try:
            if msgspec.convert(plain, _Version).format_version > FORMAT_VERSION:
                raise CheckpointTooNewError
            metadata = msgspec.convert(plain, _Metadata)
        except msgspec.ValidationError as error:
            raise CheckpointCorruptError(
                f"the snapshot's manifest is malformed: {error}"
            ) from error
        if (metadata.run_id, metadata.module_id) != (self._run_id, self._module_id):
            raise CheckpointError(
                f"the snapshot belongs to run {metadata.run_id}, module {metadata.module_id}"
            )
        if metadata.optimizer != self._optimizer:
            raise CheckpointCorruptError(
                f"the snapshot's moments are of {metadata.optimizer}, not of {self._optimizer}"
            )
        return metadata
