"""The tokens of files, kept on the disk once and memory-mapped: data larger than memory is read so.

Runs in: trainer (builds), aggregator (reads what is held out).

    DIR/<key>/training.bin, held_out.bin   tokens, little-endian
    DIR/<key>/held_out_bytes.bin           bytes that each held-out token covers, unless they are 1
    DIR/<key>/entry.json                   how far it is; whole once `is_whole`

The key is the hash of the content, the tokenizer and the fraction held out: a file that was moved
is not read again, one that has changed is another. `entry.json` is replaced after what it counts is
on the disk; after a kill the rest is cut off, and the build goes on where it says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from blake3 import blake3

from volunteer.files import PRIVATE_FILE_MODE, make_private_dir, replace_file, telling_full_disk
from volunteer.training.sources.documents import Piece
from volunteer.training.sources.skipping import SkippingTokenizer
from volunteer.training.tokenizer import Tokenizer, Tokens, UnreadableTextError

_KEY_CONTEXT = b"allmende/token-cache/1\x00"
_ENTRY_NAME = "entry.json"
_TRAINING, _HELD_OUT, _HELD_OUT_BYTES = "training.bin", "held_out.bin", "held_out_bytes.bin"
_NAMES = (_TRAINING, _HELD_OUT, _HELD_OUT_BYTES)
SAVE_EVERY_BYTES = 32 * 2**20
"""Of text, between two saved positions: what a kill makes it read again."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """How far the tokens of one file are."""

    position: int = 0
    """Of the reader."""
    file_bytes: tuple[int, int, int] = (0, 0, 0)
    """Sizes of the three files."""
    dtype: str = "uint8"
    has_bytes: bool = False
    """Whether a token may be of more or less than a byte."""
    is_whole: bool = False
    is_cut: bool = False
    """Whether the rest was left out for want of room."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes on the disk."""
        return sum(self.file_bytes)


@dataclass(frozen=True, slots=True)
class CachedText:
    """The tokens of one file."""

    training: Tokens
    held_out: Tokens
    held_out_bytes: np.ndarray[tuple[int], np.dtype[np.uint16]] | None
    """Bytes of text that each of them covers; None: one."""


def cache_key(content_hash: str, tokenizer_id: str, fraction: float) -> str:
    """Return the name of a file's tokens."""
    key = f"{content_hash}/{tokenizer_id}/{fraction!r}".encode()
    return blake3(_KEY_CONTEXT + key).hexdigest()


class TokenCache:
    """The tokens of one run's files. One process builds, any reads."""

    def __init__(self, directory: Path) -> None:
        """Use `directory`, which is made when first written to."""
        self._directory = directory

    def entry(self, key: str) -> Entry | None:
        """Return how far a file's tokens are; None: there are none of use."""
        try:
            content = (self._directory / key / _ENTRY_NAME).read_bytes()
            return msgspec.json.decode(content, type=Entry)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def build(
        self,
        key: str,
        pieces_from: Callable[[int], Iterator[Piece]],
        tokenizer: Tokenizer,
        *,
        max_bytes: int,
        name: str = "",
    ) -> Entry:
        """Have the tokens of one file, as many as there is room for.

        Args:
            key: of `cache_key`.
            pieces_from: reads the file from a position on.
            tokenizer: makes tokens of it.
            max_bytes: that they may take on the disk.
            name: of its source, for the log; empty where it is private.

        Raises:
            StorageFullError: the disk is full; what was saved stands.
            UnreadableTextError: the tokenizer fails at most of it; single pieces are left out.
            VolunteerError: the file cannot be read.
            OSError: the same.
        """
        found = self.entry(key)
        if found is not None and not self._has_files(key, found):
            found = None  # damaged: anew
        if found is not None and (found.is_whole and not (found.is_cut and max_bytes > 0)):
            return found
        folder = self._directory / key
        make_private_dir(folder)
        with telling_full_disk(folder), contextlib.ExitStack() as stack:
            begun = found or Entry()
            streams = [
                stack.enter_context(_open_at(folder / name, size))
                for name, size in zip(_NAMES, begun.file_bytes, strict=True)
            ]
            return _Build(folder, streams, tokenizer, begun, max_bytes, name).run(pieces_from)

    def open(self, key: str) -> CachedText | None:
        """Memory-map the tokens of one file; None: they are not whole, or were tampered with."""
        entry = self.entry(key)
        if entry is None or not entry.is_whole:
            return None
        folder = self._directory / key
        try:
            if not self._has_files(key, entry):
                return None
            training = _map(folder / _TRAINING, entry.file_bytes[0], np.dtype(entry.dtype))
            held_out = _map(folder / _HELD_OUT, entry.file_bytes[1], np.dtype(entry.dtype))
            lengths = _map(folder / _HELD_OUT_BYTES, entry.file_bytes[2], np.dtype(np.uint16))
        except (OSError, TypeError, ValueError):
            return None
        return CachedText(training, held_out, lengths if entry.has_bytes else None)

    def _has_files(self, key: str, entry: Entry) -> bool:
        """Tell whether all is on the disk that an entry counts."""
        try:
            sizes = [(self._directory / key / name).stat().st_size for name in _NAMES]
        except OSError:
            return False
        return all(size >= due for size, due in zip(sizes, entry.file_bytes, strict=True))

    def keep_only(self, keys: frozenset[str]) -> None:
        """Delete what belongs to files that are not in use any more."""
        if not self._directory.is_dir():
            return
        for folder in self._directory.iterdir():
            if folder.name not in keys:
                shutil.rmtree(folder, ignore_errors=True)


class _Build:
    """One run of the reader over one file."""

    def __init__(
        self,
        folder: Path,
        streams: list[BinaryIO],
        tokenizer: Tokenizer,
        begun: Entry,
        max_bytes: int,
        name: str,
    ) -> None:
        self._file = folder / _ENTRY_NAME
        self._streams = streams
        self._tokenizer = SkippingTokenizer(tokenizer, name)
        self._dtype = tokenizer.dtype
        self._begun = begun
        self._max_bytes = max_bytes
        self._has_bytes = begun.has_bytes

    def run(self, pieces_from: Callable[[int], Iterator[Piece]]) -> Entry:
        position, since_save, is_cut = self._begun.position, 0, False
        for piece in pieces_from(position):
            if not self._add(piece):
                is_cut = True
                break
            position = piece.position
            since_save += len(piece.text)
            if since_save >= SAVE_EVERY_BYTES:
                self._save(position, is_whole=False, is_cut=False)
                since_save = 0
        if (
            self._tokenizer.num_skipped
            and not self._tokenizer.num_read
            and not self._begun.position
        ):
            raise UnreadableTextError("the run's tokenizer cannot read any of it")
        return self._save(position, is_whole=True, is_cut=is_cut)

    def _add(self, piece: Piece) -> bool:
        """Append the tokens of a piece, if it can be read; return whether there was room."""
        encoded = self._tokenizer.encode(piece.text)
        if encoded is None:
            return True
        tokens = encoded.tokens.astype(self._dtype.newbyteorder("<"), copy=False)
        new_bytes = tokens.nbytes + (2 * len(tokens) if piece.is_held_out else 0)
        if sum(stream.tell() for stream in self._streams) + new_bytes > self._max_bytes:
            return False
        self._streams[1 if piece.is_held_out else 0].write(tokens.tobytes())
        if encoded.num_bytes is not None:
            self._has_bytes = True
            if piece.is_held_out:
                self._streams[2].write(encoded.num_bytes.astype("<u2", copy=False).tobytes())
        return True

    def _save(self, position: int, *, is_whole: bool, is_cut: bool) -> Entry:
        for stream in self._streams:
            stream.flush()
            os.fsync(stream.fileno())
        training, held_out, lengths = (stream.tell() for stream in self._streams)
        entry = Entry(
            position=position,
            file_bytes=(training, held_out, lengths),
            dtype=self._dtype.name,
            has_bytes=self._has_bytes,
            is_whole=is_whole,
            is_cut=is_cut,
        )
        replace_file(self._file, msgspec.json.encode(entry))
        return entry


@contextlib.contextmanager
def _open_at(file: Path, size: int) -> Iterator[BinaryIO]:
    """Open `file` for writing after its first `size` bytes; what a kill left behind them goes."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, PRIVATE_FILE_MODE)
    with os.fdopen(descriptor, "r+b") as stream:
        stream.truncate(size)
        stream.seek(size)
        yield stream


def _map(file: Path, size: int, dtype: np.dtype[np.generic]) -> Tokens:
    if size == 0:
        return np.empty(0, dtype=dtype)
    return np.memmap(file, dtype=dtype.newbyteorder("<"), mode="r", shape=(size // dtype.itemsize,))
