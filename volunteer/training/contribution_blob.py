"""The blob of a contribution: what a member publishes, and what everyone else must survive.

Runs in: trainer (writing), aggregator (parsing). Stages 3 and 4 of a round. Pure, but for the read.

The file is safetensors in canonical form (blob_format.py): the codec's tensors
(`compression.tensor_entries`), and in `__metadata__` what it is for. A reader knows all of that
beforehand, so it compares; the only freedom a stranger has is in the tensors' values, and
`verify_bounds` limits that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from volunteer.errors import ContributionRejectedError
from volunteer.run import CodecSpec
from volunteer.training.blob_format import (
    MAX_HEADER_BYTES,
    TensorEntry,
    describe_difference,
    file_bytes,
    header_bytes,
)
from volunteer.training.compression import EncodedGradient, from_tensors, tensor_entries

FORMAT = "allmende/contribution/1"
_STORED = {"F32": "<f4", "F16": "<f2", "I8": "i1", "U8": "u1"}
_NATIVE = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "U8": np.uint8}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobKey:
    """What a contribution's blob is for; all of it is in the header."""

    run_id: str
    module_id: str
    author: str
    """Peer id of who made it: nobody can announce another's blob as his own."""
    round_index: int
    """Height of the commit that it was made on."""
    codec: CodecSpec
    num_elements: int
    """P of the run's model."""

    @property
    def metadata(self) -> dict[str, str]:
        """The header's `__metadata__`; safetensors allows strings only."""
        return {
            "format": FORMAT,
            "run_id": self.run_id,
            "module_id": self.module_id,
            "author": self.author,
            "round_index": str(self.round_index),
            "codec": self.codec.id,
            "codec_version": str(self.codec.version),
            "num_elements": str(self.num_elements),
            "block_elements": str(self.codec.block_elements),
        }

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The file's tensors."""
        return tensor_entries(self.codec, self.num_elements, self.round_index)

    @property
    def header(self) -> bytes:
        """The file's beginning."""
        return header_bytes(self.metadata, self.entries)

    @property
    def size_bytes(self) -> int:
        """The file's exact length."""
        return file_bytes(self.header, self.entries)


def contribution_parts(encoded: EncodedGradient, key: BlobKey) -> tuple[memoryview, ...]:
    """Return the blob in pieces that follow each other; none of `encoded` is copied.

    Raises:
        ValueError: `encoded` is of another length, block size or density than `key` says.
    """
    if (encoded.num_elements, encoded.block_elements) != (
        key.num_elements,
        key.codec.block_elements,
    ):
        raise ValueError(f"a vector of {encoded.num_elements} elements is not one of {key}")
    sizes = [tensor.numel() for tensor in encoded.tensors]
    if sizes != [entry.num_elements for entry in key.entries]:
        raise ValueError(f"tensors of {sizes} elements are not those of {key}")
    arrays = [
        tensor.cpu().numpy().astype(_STORED[entry.dtype], copy=False)
        for tensor, entry in zip(encoded.tensors, key.entries, strict=True)
    ]
    return memoryview(key.header), *(array.data.cast("B") for array in arrays)


def write_contribution_blob(encoded: EncodedGradient, key: BlobKey) -> bytes:
    """Return the blob. Cost: the blob in memory, once more than `encoded`."""
    return b"".join(contribution_parts(encoded, key))


def parse_contribution_blob(
    data: bytes | npt.NDArray[np.uint8], key: BlobKey, *, is_known: bool = False
) -> EncodedGradient:
    """Check a stranger's blob and return what it holds.

    Args:
        data: the blob; a writable array (a private memory map, say) is used without a copy.
        key: what it has to be for.
        is_known: the same bytes have passed before, for the same: their values are not looked at.

    Raises:
        ContributionRejectedError: with a sentence that says why.
    """
    blob = np.frombuffer(data, dtype=np.uint8) if isinstance(data, bytes) else data
    header = key.header
    if blob[: len(header)].tobytes() != header:
        difference = describe_difference(blob[:MAX_HEADER_BYTES].tobytes(), key.metadata)
        raise ContributionRejectedError(f"the blob is not the one that was due: {difference}")
    if len(blob) != key.size_bytes:
        raise ContributionRejectedError(
            f"the blob has {len(blob)} bytes where {key.size_bytes} are due"
        )
    if not blob.flags.writeable:
        blob = blob.copy()  # torch knows no read-only memory
    tensors = []
    start = len(header)
    for entry in key.entries:
        array = blob[start : start + entry.size_bytes].view(_STORED[entry.dtype])
        tensors.append(torch.from_numpy(array.astype(_NATIVE[entry.dtype], copy=False)))
        start += entry.size_bytes
    encoded = from_tensors(tuple(tensors), key.codec, key.num_elements, key.round_index)
    if not is_known:
        encoded.verify_bounds()
    return encoded


def read_contribution_blob(file: Path, key: BlobKey, *, is_known: bool = False) -> EncodedGradient:
    """Memory-map a blob and parse it (arguments: `parse_contribution_blob`).

    The file must not change while the result is in use; files in a BlobStore never do.

    Raises:
        ContributionRejectedError: as `parse_contribution_blob`.
        OSError: the file cannot be read.
    """
    if file.stat().st_size == 0:  # cannot be mapped
        raise ContributionRejectedError("the blob is empty")
    data = np.memmap(file, dtype=np.uint8, mode="c")
    return parse_contribution_blob(data, key, is_known=is_known)


class _Claim(msgspec.Struct):
    round_index: str


class _ClaimHeader(msgspec.Struct):
    metadata: _Claim = msgspec.field(name="__metadata__")


def claimed_round_index(file: Path) -> int:
    """Return the round that a blob says it is for; believe it only where `parse` agrees.

    Raises:
        ContributionRejectedError: no such claim can be read.
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(length, MAX_HEADER_BYTES))
    try:
        claim = msgspec.json.decode(text, type=_ClaimHeader).metadata.round_index
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContributionRejectedError("the blob's header is malformed") from error
    if not (claim.isascii() and claim.isdigit() and len(claim) <= 13):  # below 2^40 and a bit
        raise ContributionRejectedError("the blob names no round")
    return int(claim)
