"""Reads text files, JSON Lines and parquet as pieces of text, from any place on, in bounded memory.

Runs in: trainer. A piece is what is given to the tokenizer at once; its `position` is where a
reader goes on after it, so that a build of many hours survives a kill.

A text file is cut in two: its last `held_out_fraction` is held out. In JSON Lines and parquet,
where a line or row is a document, one is held out by its content's hash: the same for every member,
in whatever order, and for every copy of it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
from blake3 import blake3

from volunteer.errors import DataUnavailableError

PIECE_BYTES = 2**20
"""Of text, at most, in a piece of a text file."""
MAX_LINE_BYTES = 64 * 2**20
SEPARATOR = b"\n\n"
"""Between documents."""
JSON_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIX = ".parquet"
TEXT_SUFFIXES = frozenset({".txt", ".text", ".md"})
SUFFIXES = JSON_SUFFIXES | TEXT_SUFFIXES | {PARQUET_SUFFIX}
_HELD_OUT_CONTEXT = b"allmende/held-out/1\x00"
_ROWS = 64
_INSTALL = "pipx inject allmende pyarrow"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text."""

    text: bytes
    is_held_out: bool
    position: int
    """Where a reader goes on after it: bytes or rows."""


class _Row(msgspec.Struct):
    text: str


_row_decoder = msgspec.json.Decoder(_Row)


def is_held_out(text: bytes, fraction: float) -> bool:
    """Tell whether a document is for evaluation, from its content alone."""
    draw = int.from_bytes(blake3(_HELD_OUT_CONTEXT + text).digest(length=8), "little")
    return draw < int(fraction * 2.0**64)


def read_pieces(file: Path, start: int, fraction: float) -> Iterator[Piece]:
    """Yield the pieces of a file from `start` on, which is 0 or the position of a piece.

    Args:
        file: its suffix says what it is.
        start: where to begin.
        fraction: held out.

    Raises:
        DataUnavailableError: it cannot be read as what it should be, or a library is missing.
        OSError: it cannot be read.
    """
    suffix = file.suffix.lower()
    if suffix == PARQUET_SUFFIX:
        yield from _read_parquet(file, start, fraction)
        return
    with file.open("rb") as stream:
        if suffix in JSON_SUFFIXES:
            yield from _read_json_lines(stream, start, fraction)
        else:
            num_bytes = stream.seek(0, 2)
            yield from read_text(stream, num_bytes, start, fraction)


def read_text(stream: BinaryIO, num_bytes: int, start: int, fraction: float) -> Iterator[Piece]:
    """Yield the pieces of a text of `num_bytes`, cut at the end of lines or at least of characters.

    Raises:
        OSError: it cannot be read.
    """
    split = num_bytes - int(num_bytes * fraction)
    stream.seek(start)
    position = start
    while position < num_bytes:
        end = split if position < split else num_bytes
        text = stream.read(min(PIECE_BYTES, end - position))
        if not text:
            return  # it has become shorter
        if position + len(text) < end:
            text = text[: _cut(text)]
            stream.seek(position + len(text))
        is_last_part = position >= split
        position += len(text)
        yield Piece(text, is_last_part, position)


def _cut(text: bytes) -> int:
    """Return the length of `text` up to its last line's end, or its last whole character."""
    line_end = text.rfind(b"\n") + 1
    if line_end:
        return line_end
    for back in range(1, 5):
        if back < len(text) and text[-back] & 0xC0 != 0x80:
            return len(text) - back
    return len(text)


def _read_json_lines(stream: BinaryIO, start: int, fraction: float) -> Iterator[Piece]:
    stream.seek(start)
    num_bad = 0
    while line := stream.readline(MAX_LINE_BYTES):
        position = stream.tell()
        if not line.strip():
            continue
        try:
            document = _row_decoder.decode(line).text.encode("utf-8", errors="replace")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            num_bad += 1
            continue
        yield Piece(document + SEPARATOR, is_held_out(document, fraction), position)
    if num_bad:
        _log.warning("lines without a text field, left out: %d", num_bad)


def _read_parquet(file: Path, start: int, fraction: float) -> Iterator[Piece]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataUnavailableError(
            "parquet files need the library `pyarrow`", hint=_INSTALL
        ) from error
    position = 0
    try:
        with pq.ParquetFile(file) as parquet:
            for group in range(parquet.num_row_groups):
                num_rows = parquet.metadata.row_group(group).num_rows
                if position + num_rows <= start:
                    position += num_rows
                    continue
                batches = parquet.iter_batches(_ROWS, row_groups=[group], columns=["text"])
                for row in (row for batch in batches for row in batch.column(0).to_pylist()):
                    position += 1
                    if position > start and isinstance(row, str):
                        document = row.encode("utf-8", errors="replace")
                        yield Piece(document + SEPARATOR, is_held_out(document, fraction), position)
    except (pa.ArrowException, ValueError, LookupError, OverflowError) as error:
        # A text that is not UTF-8, or numbers that Python has no form for, among others.
        raise DataUnavailableError(f"a parquet file cannot be read: {error}"[:300]) from error
