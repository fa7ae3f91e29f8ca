"""What a checkpoint says about itself: the manifest, and the pointer to the latest one.

Runs in: trainer. Pure, but for `hash_file`.

Both are *sealed*: one line of JSON that names its format version, and one line with the blake3 of
the first. The seal is the same in every version, so a flipped bit in the version is told from a
newer version. checkpoint/FORMAT.md is the reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from blake3 import blake3

from volunteer.errors import CheckpointCorruptError, CheckpointTooNewError

FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 4 * 1024 * 1024  # large enough for blake3 to use every core

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
"""What metadata may hold: finite numbers only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint."""

    sequence: int
    """Counts up from 1; above every other in the folder when it was written."""
    payload_name: str
    """File name, beside the manifest."""
    payload_bytes: int
    payload_hash: str
    """Lower-case hex of blake3 over the whole file."""
    metadata: Mapping[str, JSON]
    """The caller's own."""


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest file.

    Raises:
        ValueError: the metadata is not JSON, has a number that is not finite, or is too large.
    """
    body: dict[str, JSON] = {
        "sequence": manifest.sequence,
        "payload": {
            "name": manifest.payload_name,
            "bytes": manifest.payload_bytes,
            "blake3": manifest.payload_hash,
        },
        "metadata": manifest.metadata,
    }
    sealed = _seal(body)
    if len(sealed) > MAX_MANIFEST_BYTES:
        raise ValueError(f"metadata of {len(sealed)} bytes, at most {MAX_MANIFEST_BYTES} allowed")
    return sealed


def parse_manifest(data: bytes) -> Manifest:
    """Parse the bytes of a manifest file.

    Raises:
        CheckpointCorruptError: not what `encode_manifest` returned.
        CheckpointTooNewError: undamaged, and of a later version.
    """
    body = _unseal(data)
    try:
        payload = body["payload"]
        return Manifest(
            sequence=int(body["sequence"]),
            payload_name=str(payload["name"]),
            payload_bytes=int(payload["bytes"]),
            payload_hash=str(payload["blake3"]),
            metadata=dict(body["metadata"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"not a manifest: {error!r}") from error


def encode_latest(sequence: int) -> bytes:
    """Return the bytes of the file `LATEST`."""
    return _seal({"sequence": sequence})


def parse_latest(data: bytes) -> int:
    """Return the sequence number in the bytes of `LATEST`; raises like `parse_manifest`."""
    try:
        return int(_unseal(data)["sequence"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"not a pointer: {error!r}") from error


def hash_file(file: Path) -> str:
    """Return the lower-case hex of blake3 over the content of `file`.

    Not through a memory map: there a bad sector is a SIGBUS, which ends the process, and not an
    OSError.

    Cost: reads the whole file, a piece at a time.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(_PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()


def _seal(body: Mapping[str, JSON]) -> bytes:
    try:
        text = json.dumps({"version": FORMAT_VERSION, **body}, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"metadata is not JSON: {error}") from error
    line = text.encode() + b"\n"
    return line + blake3(line).hexdigest().encode() + b"\n"


def _unseal(data: bytes) -> dict[str, Any]:
    line, newline, seal = data.partition(b"\n")
    if seal != blake3(line + newline).hexdigest().encode() + b"\n":
        raise CheckpointCorruptError("the content does not match its seal")
    try:
        body = json.loads(line)
        version = int(body["version"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"sealed, but not by this program: {error!r}") from error
    if version > FORMAT_VERSION:
        raise CheckpointTooNewError(f"format {version}, this version reads {FORMAT_VERSION}")
    assert isinstance(body, dict)
    return body
