"""What the inner steps read: windows of the built-in texts, chosen by a counter.

Runs in: trainer (training windows), aggregator (held-out windows). Stage 1 of a round.

The last `held_out_fraction` of *each* text is never trained on. Which windows inner step n reads is
a function of (run_id, peer_seed, n) alone: two volunteers rarely read the same, a restart goes on
where it stopped, and the position needs no file of its own.

Shape legend: B sequences, T1 = context_tokens + 1 (inputs and, one further, targets).
"""

from __future__ import annotations

import functools
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from volunteer.errors import RunSpecError
from volunteer.run import DataSpec

_BUILTIN_PREFIX = "builtin:"
_TEXT_SUFFIX = ".txt.xz"
_STREAM_CONTEXT = b"allmende/windows/1\x00"
_DRAW_BYTES = 8  # of 64 bits; modulo 10^7 windows the bias is below 10^-12

Tokens = npt.NDArray[np.uint8]
"""Byte-level tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One source, cut in two."""

    name: str
    training: Tokens
    """The first part, shape (n,)."""
    held_out: Tokens
    """The last part, shape (m,); no training window reaches into it."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The texts of a run, in the RunSpec's order."""

    texts: tuple[Text, ...]


def builtin_names() -> tuple[str, ...]:
    """Return the names of the texts that the package ships, sorted."""
    files = resources.files("volunteer.data").iterdir()
    names = (file.name for file in files if file.name.endswith(_TEXT_SUFFIX))
    return tuple(sorted(name.removesuffix(_TEXT_SUFFIX) for name in names))


@functools.cache
def read_builtin_text(name: str) -> Tokens:
    """Return a text of the package, decoded once a process.

    Returns:
        uint8, shape (n,), read-only.

    Raises:
        RunSpecError: no text of this name is shipped, or it cannot be read.
    """
    if name not in builtin_names():
        known = ", ".join(_BUILTIN_PREFIX + known_name for known_name in builtin_names())
        raise RunSpecError(f"data.sources: {_BUILTIN_PREFIX}{name} is unknown; known: {known}")
    file = resources.files("volunteer.data").joinpath(name + _TEXT_SUFFIX)
    try:
        return np.frombuffer(lzma.decompress(file.read_bytes()), dtype=np.uint8)
    except (OSError, lzma.LZMAError) as error:
        raise RunSpecError(
            f"{_BUILTIN_PREFIX}{name}: {error}", hint="the installation is damaged: reinstall it"
        ) from error


def load_corpus(data: DataSpec) -> Corpus:
    """Read the texts that `data` names and cut off their held-out parts.

    Raises:
        RunSpecError: a source is unknown or unreadable.
    """
    texts = []
    for source in data.sources:
        name = source.removeprefix(_BUILTIN_PREFIX)
        tokens = read_builtin_text(name)
        num_training = len(tokens) - int(len(tokens) * data.held_out_fraction)
        texts.append(
            Text(name=name, training=tokens[:num_training], held_out=tokens[num_training:])
        )
    return Corpus(tuple(texts))


def training_windows(
    corpus: Corpus,
    *,
    run_id: str,
    peer_seed: bytes,
    inner_step: int,
    num_sequences: int,
    context_tokens: int,
) -> Tokens:
    """Return what inner step `inner_step` of the volunteer with `peer_seed` reads.

    Every window of the training parts is equally likely, whichever text it is in.

    Returns:
        uint8, shape (B, T1) with B = num_sequences, T1 = context_tokens + 1.

    Raises:
        RunSpecError: no text is long enough for a window.
    """
    key = f"{run_id}/{peer_seed.hex()}/{inner_step}".encode()
    stream = blake3(_STREAM_CONTEXT + key).digest(length=_DRAW_BYTES * num_sequences)
    parts = [text.training for text in corpus.texts]
    num_windows = _count_windows(parts, context_tokens + 1, what="training")
    draws = np.frombuffer(stream, dtype="<u8") % np.uint64(num_windows)
    return _cut_windows(parts, [int(draw) for draw in draws], context_tokens + 1)


def held_out_windows(corpus: Corpus, *, num_sequences: int, context_tokens: int) -> Tokens:
    """Return the fixed windows of evaluation: evenly spread over all held-out text.

    Returns:
        uint8, shape (B, T1) with B = num_sequences, T1 = context_tokens + 1.

    Raises:
        RunSpecError: no held-out part is long enough for a window.
    """
    parts = [text.held_out for text in corpus.texts]
    num_windows = _count_windows(parts, context_tokens + 1, what="held-out")
    middles = [(2 * i + 1) * num_windows // (2 * num_sequences) for i in range(num_sequences)]
    return _cut_windows(parts, middles, context_tokens + 1)


def _count_windows(parts: Sequence[Tokens], window_tokens: int, *, what: str) -> int:
    num_windows = sum(max(0, len(part) - window_tokens + 1) for part in parts)
    if num_windows == 0:
        raise RunSpecError(f"data: no {what} text has {window_tokens} tokens, one window")
    return num_windows


def _cut_windows(parts: Sequence[Tokens], indices: Sequence[int], window_tokens: int) -> Tokens:
    """Cut the windows numbered `indices`, counting through `parts`; none crosses two parts."""
    windows = np.empty((len(indices), window_tokens), dtype=np.uint8)
    counts = [max(0, len(part) - window_tokens + 1) for part in parts]
    ends = np.cumsum(counts)
    for row, index in enumerate(indices):
        part = int(np.searchsorted(ends, index, side="right"))
        start = index - int(ends[part] - counts[part])
        windows[row] = parts[part][start : start + window_tokens]
    return windows
