"""What a blob's id is: a hash over the hashes of its chunks. Runs in: every process. Pure.

    id = hex(blake3(b"allmende/blob/1" || u64le(size) || blake3(chunk_0) || blake3(chunk_1) || ...))

so that whoever knows the id can check a list of chunk hashes before fetching any chunk, and each
chunk before having the whole. PROTOCOL.md section 4.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from blake3 import blake3

from p2p.framing import HASH_BYTES

CHUNK_BYTES: Final = 1 << 20
MAX_BLOB_BYTES: Final = 16 << 30  # 16,384 chunk hashes: a manifest of 512 KiB
BLOB_ID_CHARS: Final = 64

_DOMAIN: Final = b"allmende/blob/1"
_HEX: Final = frozenset(string.digits + "abcdef")


def is_blob_id(text: str) -> bool:
    """Tell whether `text` is 64 lower-case hex digits. Never raises."""
    return len(text) == BLOB_ID_CHARS and _HEX.issuperset(text)


def chunk_hash(chunk: bytes | bytearray | memoryview) -> bytes:
    """Hash one chunk: blake3, 32 bytes."""
    return blake3(chunk).digest()


def num_chunks_of(size_bytes: int) -> int:
    """Count the chunks of a blob of `size_bytes`; every one but the last has CHUNK_BYTES."""
    return -(-size_bytes // CHUNK_BYTES)


def chunk_size_bytes(size_bytes: int, chunk_index: int) -> int:
    """Give the length of chunk `chunk_index` of a blob of `size_bytes`."""
    return min(CHUNK_BYTES, size_bytes - chunk_index * CHUNK_BYTES)


def blob_id_of(size_bytes: int, hashes: Iterable[bytes]) -> str:
    """Make the id of a blob of `size_bytes` whose chunks hash to `hashes`."""
    hasher = blake3(_DOMAIN + size_bytes.to_bytes(8, "little"))
    for digest in hashes:
        hasher.update(digest)
    return hasher.hexdigest()


def fits_id(blob_id: str, size_bytes: int, hashes: tuple[bytes, ...]) -> bool:
    """Tell whether a size and chunk hashes are those that `blob_id` stands for."""
    return (
        0 <= size_bytes <= MAX_BLOB_BYTES
        and len(hashes) == num_chunks_of(size_bytes)
        and all(len(digest) == HASH_BYTES for digest in hashes)
        and blob_id_of(size_bytes, hashes) == blob_id
    )


def cut_chunks(parts: Sequence[memoryview]) -> Iterator[bytes | memoryview]:
    """Cut what lies in pieces, each of bytes, into chunks; only where two meet is one copied."""
    rest = b""
    for part in parts:
        start = min(len(part), (CHUNK_BYTES - len(rest)) % CHUNK_BYTES) if rest else 0
        rest += part[:start]
        if len(rest) == CHUNK_BYTES:
            yield rest
            rest = b""
        while len(part) - start >= CHUNK_BYTES:
            yield part[start : start + CHUNK_BYTES]
            start += CHUNK_BYTES
        rest += part[start:]
    if rest:
        yield rest


def hash_chunks(file: Path) -> tuple[bytes, ...]:
    """Hash each chunk of `file`. Cost: one read of the file, 1 MiB of memory."""
    hashes = []
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            hashes.append(chunk_hash(chunk))
    return tuple(hashes)


def blob_id_of_file(file: Path) -> str:
    """Compute the blob id of `file`. Cost: one read of the file."""
    hashes = hash_chunks(file)
    return blob_id_of(file.stat().st_size, hashes)


def blob_id_of_bytes(data: bytes) -> str:
    """Compute the blob id of `data`."""
    return blob_id_of(len(data), hashes_of_bytes(data))


def hashes_of_bytes(data: bytes) -> tuple[bytes, ...]:
    """Hash each chunk of `data`."""
    view = memoryview(data)
    return tuple(
        chunk_hash(view[start : start + CHUNK_BYTES]) for start in range(0, len(data), CHUNK_BYTES)
    )
