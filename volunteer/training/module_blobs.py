"""The blobs that training reads and writes: shared weights, and one's own contributions.

Runs in: trainer.

Whatever is read is first checked against its id: a damaged disk must not become a wrong update.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from p2p.blobstore import BlobStore, is_blob_id
from p2p.errors import BlobStoreFullError
from volunteer.errors import CheckpointCorruptError, StorageFullError, TrainerError
from volunteer.messages import OwnWork
from volunteer.run import RunSpec
from volunteer.training.compression import EncodedGradient, decode
from volunteer.training.contribution_blob import (
    BlobKey,
    claimed_round_index,
    contribution_parts,
    read_contribution_blob,
)
from volunteer.training.layout import num_parameters
from volunteer.training.state import read_state


class ModuleBlobs:
    """The blob store of one module of one run, as tensors."""

    def __init__(self, store: BlobStore, spec: RunSpec, module_id: str, author: str) -> None:
        """Use `store`, as the agent and the aggregator do; `author` is our own peer id."""
        self._store = store
        self._spec = spec
        self._module_id = module_id
        self._author = author
        self._num_parameters = num_parameters(spec.model)

    def read_shared_weights(self, state_hash: str) -> Tensor:
        """Return G of a shared state: fp32, shape (P,), CPU, memory-mapped; do not keep it.

        Raises:
            TrainerError: it is not in the store.
            CheckpointCorruptError: the file is damaged.

        Cost: reads the file once.
        """
        file = self._verified_file(state_hash, what="shared state")
        return read_state(file, self._num_parameters).weights_P

    def store_contribution(self, encoded: EncodedGradient, round_index: int) -> tuple[str, int]:
        """Put a contribution's blob on the disk for good; return (blob_id, size_bytes).

        Raises:
            StorageFullError: no room; nothing is left behind.
        """
        parts = contribution_parts(encoded, self._key(round_index))
        try:
            return self._store.add_parts(parts), sum(map(len, parts))
        except BlobStoreFullError as error:
            raise StorageFullError(str(error), hint=error.hint) from error

    def load_quantised(self, work: OwnWork) -> Tensor:
        """Return Q of an own contribution: fp32, shape (P,), CPU.

        Raises:
            TrainerError: its blob is not in the store.
            CheckpointCorruptError: the file is damaged.
            ContributionRejectedError: it is no contribution of this run.
        """
        file = self._verified_file(work.blob_id, what=f"contribution {work.contribution_id}")
        return decode(read_contribution_blob(file, self._key(claimed_round_index(file))))

    def _key(self, round_index: int) -> BlobKey:
        return BlobKey(
            run_id=self._spec.run_id,
            module_id=self._module_id,
            author=self._author,
            round_index=round_index,
            codec=self._spec.codec,
            num_elements=self._num_parameters,
        )

    def _verified_file(self, blob_id: str, *, what: str) -> Path:
        if not is_blob_id(blob_id) or not self._store.has(blob_id):
            raise TrainerError(f"{what}: blob {blob_id} is not in {self._store.directory}")
        if not self._store.verify(blob_id):
            raise CheckpointCorruptError(
                f"{what}: blob {blob_id} is damaged on the disk",
                hint="it is fetched again from other members once it is deleted",
            )
        return self._store.file_of(blob_id)
