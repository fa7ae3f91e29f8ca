"""What the inner steps read: windows of texts, chosen by a counter.

Runs in: trainer (training windows), aggregator (held-out windows). Stage 1 of a round.

The last `held_out_fraction` of *each* text is never trained on. Which windows inner step n reads is
a function of (run_id, peer_seed, n) alone: two volunteers rarely read the same, a restart goes on
where it stopped, and the position needs no file of its own. (Streams have one: feed.py.)

Shape legend: B sequences, T1 = context_tokens + 1 (inputs and, one further, targets).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from volunteer.data.sources import Source, SourceKind, parse_source
from volunteer.errors import DataUnavailableError, RunSpecError
from volunteer.run import DataSpec
from volunteer.training.sources.builtin_texts import builtin_names, read_builtin_text
from volunteer.training.sources.prepare import open_texts
from volunteer.training.tokenizer import Tokens

__all__ = [
    "Corpus",
    "Text",
    "Tokens",
    "builtin_names",
    "held_out_window_bytes",
    "held_out_windows",
    "load_corpus",
    "read_builtin_text",
    "training_windows",
]

_STREAM_CONTEXT = b"allmende/windows/1\x00"
_DRAW_BYTES = 8  # of 64 bits; modulo 10^7 windows the bias is below 10^-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One source, or one file of it, cut in two."""

    name: str
    training: Tokens
    """The first part, shape (n,)."""
    held_out: Tokens
    """The last part, shape (m,); no training window reaches into it."""
    held_out_bytes: npt.NDArray[np.uint16] | None = None
    """Bytes of text that each token of `held_out` covers, shape (m,); None: one."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The texts of a run, in the RunSpec's order."""

    texts: tuple[Text, ...]

    def has_training_windows(self, context_tokens: int) -> bool:
        """Tell whether any text is long enough to train on."""
        return any(len(text.training) > context_tokens for text in self.texts)


def load_corpus(
    data: DataSpec, run_dir: Path | None = None, *, only_public: bool = False
) -> Corpus:
    """Open the texts that `data` names and that can be read at any place.

    Args:
        data: of the RunSpec.
        run_dir: the run's folder, where what is not shipped with the package has been prepared.
        only_public: leave out what is private; then streams count, with what is held out of them,
            and nothing may be missing: the loss is measured on the same text every time.

    Raises:
        RunSpecError: a source is unknown or unreadable.
        DataUnavailableError: it has not been prepared.
    """
    texts: list[Text] = []
    for source in map(parse_source, data.sources):
        if source.kind is SourceKind.BUILTIN and data.tokenizer == "bytes":
            texts.append(_builtin_text(source.name, data.held_out_fraction))
        elif source.is_public if only_public else not source.is_stream:
            texts += _cached_texts(source, run_dir)
    return Corpus(tuple(texts))


def _builtin_text(name: str, held_out_fraction: float) -> Text:
    tokens = read_builtin_text(name)
    num_training = len(tokens) - int(len(tokens) * held_out_fraction)
    return Text(name=name, training=tokens[:num_training], held_out=tokens[num_training:])


def _cached_texts(source: Source, run_dir: Path | None) -> list[Text]:
    cached = None if run_dir is None else open_texts(run_dir, source)
    if cached is None:
        raise DataUnavailableError(f"{source.text} has not been prepared yet")
    return [
        Text(
            name=source.text,
            training=text.training,
            held_out=text.held_out,
            held_out_bytes=text.held_out_bytes,
        )
        for text in cached
    ]


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
        uint8 where tokens are bytes, shape (B, T1) with B = num_sequences, T1 = context_tokens + 1.

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
        uint8 where tokens are bytes, shape (B, T1) with B = num_sequences, T1 = context_tokens + 1.

    Raises:
        RunSpecError: no held-out part is long enough for a window.
    """
    parts = [text.held_out for text in corpus.texts]
    return _cut_windows(parts, _middles(parts, num_sequences, context_tokens), context_tokens + 1)


def held_out_window_bytes(
    corpus: Corpus, *, num_sequences: int, context_tokens: int
) -> npt.NDArray[np.int64]:
    """Return how many bytes of text the targets of each window of `held_out_windows` cover.

    Returns:
        Shape (B,): context_tokens where tokens are bytes.

    Raises:
        RunSpecError: no held-out part is long enough for a window.
    """
    parts = [text.held_out for text in corpus.texts]
    middles = _middles(parts, num_sequences, context_tokens)
    lengths: list[Tokens] = [
        np.ones(len(text.held_out), dtype=np.uint16)
        if text.held_out_bytes is None
        else text.held_out_bytes
        for text in corpus.texts
    ]
    of_each = _cut_windows(lengths, middles, context_tokens + 1)
    num_bytes: npt.NDArray[np.int64] = of_each[:, 1:].sum(axis=1, dtype=np.int64)
    return num_bytes  # without the first token, which is no target


def _middles(parts: Sequence[Tokens], num_sequences: int, context_tokens: int) -> list[int]:
    num_windows = _count_windows(parts, context_tokens + 1, what="held-out")
    return [(2 * i + 1) * num_windows // (2 * num_sequences) for i in range(num_sequences)]


def _count_windows(parts: Sequence[Tokens], window_tokens: int, *, what: str) -> int:
    num_windows = sum(max(0, len(part) - window_tokens + 1) for part in parts)
    if num_windows == 0:
        raise RunSpecError(f"data: no {what} text has {window_tokens} tokens, one window")
    return num_windows


def _cut_windows(parts: Sequence[Tokens], indices: Sequence[int], window_tokens: int) -> Tokens:
    """Cut the windows numbered `indices`, counting through `parts`; none crosses two parts."""
    windows = np.empty((len(indices), window_tokens), dtype=parts[0].dtype)
    counts = [max(0, len(part) - window_tokens + 1) for part in parts]
    ends = np.cumsum(counts)
    for row, index in enumerate(indices):
        part = int(np.searchsorted(ends, index, side="right"))
        start = index - int(ends[part] - counts[part])
        windows[row] = parts[part][start : start + window_tokens]
    return windows
