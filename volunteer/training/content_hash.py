"""What a contribution's blob holds, without who made it for which round: one hash.

Runs in: agent (own blobs, before they are announced), aggregator (everybody's). No torch.

A blob's header names author and round, so the same numbers sent again have another blob id. Their
content hash is the same, and every record states it: who repeats itself, or others, is seen by
members that never had the old blob (rounds/bad_work.py).
"""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

_CONTEXT = b"allmende/content/1\x00"
_LENGTH_BYTES = 8
_PIECE_BYTES = 2**20


def content_hash_of(file: Path) -> str:
    """Return the hash of what follows a blob's header, lower-case hex.

    Args:
        file: u64le header length, header, tensors (blob_format.py). Of a file that is no such blob,
            everything is hashed: it is refused for what it is elsewhere.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = blake3(_CONTEXT)
    with file.open("rb") as stream:
        header_bytes = _LENGTH_BYTES + int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        is_blob = header_bytes <= file.stat().st_size
        stream.seek(header_bytes if is_blob else 0)
        while piece := stream.read(_PIECE_BYTES):
            hasher.update(piece)
    return hasher.hexdigest()
