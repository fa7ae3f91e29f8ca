"""The one byte form of our tensor files: safetensors with a header that has no freedom.

Runs in: trainer, aggregator. Pure.

A state file and a contribution's blob are named by the hash of their bytes, so one content must
have one byte form. The header is therefore a function of what the reader expects anyway (run,
round, sizes), and reading is comparing: nothing in a stranger's header is ever believed. Any
safetensors reader can open the files.

    u64le header length | JSON, sorted keys, no blanks, padded with blanks to 8 | tensor bytes (LE)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

MAX_HEADER_BYTES = 4096
"""Ours have about 500; a longer one is not ours."""
_LENGTH_BYTES = 8
_ALIGNMENT_BYTES = 8  # so that every tensor can be memory-mapped as numbers
_ITEM_BYTES = {"F32": 4, "F16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the file; entries follow each other without gaps."""

    name: str
    dtype: str
    """As safetensors names it: F32, F16, I8 or U8."""
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Its length in the file."""
        return self.num_elements * _ITEM_BYTES[self.dtype]


class _Header(msgspec.Struct):
    """What is read of a header that was not the expected one: only to say what differs."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


_header_decoder = msgspec.json.Decoder(_Header)


def header_bytes(metadata: Mapping[str, str], entries: tuple[TensorEntry, ...]) -> bytes:
    """Return the canonical beginning of the file, length field included."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    start = 0
    for entry in entries:
        table[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [start, start + entry.size_bytes],
        }
        start += entry.size_bytes
    text = json.dumps(table, sort_keys=True, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def file_bytes(header: bytes, entries: tuple[TensorEntry, ...]) -> int:
    """Return the exact length of the file."""
    return len(header) + sum(entry.size_bytes for entry in entries)


def describe_difference(beginning: bytes, metadata: Mapping[str, str]) -> str:
    """Say in which way a header that is not the expected one differs.

    Args:
        beginning: the first bytes of the file, hostile; MAX_HEADER_BYTES of them are enough.
        metadata: what the expected header states.
    """
    length = int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if len(beginning) < _LENGTH_BYTES or not 0 < length <= MAX_HEADER_BYTES - _LENGTH_BYTES:
        return "it does not begin with a header of ours"
    try:
        found = _header_decoder.decode(beginning[_LENGTH_BYTES : _LENGTH_BYTES + length]).metadata
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "its header is malformed"
    for key, value in metadata.items():
        if found.get(key) != value:
            return f"its {key} is {found.get(key)!r:.80}, not {value!r}"
    return "its header is not in the canonical form for these sizes"
