"""Puts a run's feed together out of its folder: the tokenizer, the texts, the streams.

Runs in: trainer, before the first step.

    RUN_DIR/data/hub/           what the library `datasets` keeps
    RUN_DIR/data/positions.json where the streams are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from p2p.blobstore import BlobStore
from volunteer.data.sources import Source, SourceKind, parse_source
from volunteer.errors import DataUnavailableError
from volunteer.local_data import read_local_data
from volunteer.run import RunSpec
from volunteer.training.data import load_corpus
from volunteer.training.feed import Feed, Stream
from volunteer.training.sources.documents import Piece
from volunteer.training.sources.hub import HubDataset
from volunteer.training.sources.prepare import (
    data_dir,
    held_out_bytes,
    needs_cache,
    prepare,
    stream_key,
    token_cache,
)
from volunteer.training.sources.stream import Dataset, WindowReader, held_out_pieces
from volunteer.training.tokenizer import Tokenizer, load_tokenizer

OpenDataset = Callable[[Source, Path], Dataset]
_HELD_OUT_MAX_BYTES = 2**30


def open_feed(
    spec: RunSpec,
    peer_seed: bytes,
    run_dir: Path,
    store: BlobStore,
    *,
    tell: Callable[[], None],
    open_dataset: OpenDataset = HubDataset,
) -> Feed:
    """Return what the inner steps read, after making tokens of what is on this machine.

    Args:
        spec: the run.
        peer_seed: makes this volunteer's windows its own.
        run_dir: the run's folder.
        store: has the tokenizer's file.
        tell: called every few seconds: it may take hours, the first time.
        open_dataset: opens a stream.

    Raises:
        DataUnavailableError: there is nothing to train on just now.
        RunSpecError: a source or the tokenizer is of no use.
        StorageFullError: there is no room for the tokens.
    """
    if not needs_cache(spec):
        return Feed(spec, peer_seed, load_corpus(spec.data))
    tokenizer = load_tokenizer(spec, store)
    prepare(spec, run_dir, tokenizer, read_local_data(run_dir), tell)
    corpus = load_corpus(spec.data, run_dir)
    sources = [parse_source(text) for text in spec.data.sources]
    streams = [
        _open_stream(spec, peer_seed, run_dir, tokenizer, number, source, open_dataset)
        for number, source in enumerate(sources)
        if source.kind is SourceKind.HF
    ]
    if not streams and not corpus.has_training_windows(spec.model.context_tokens):
        raise DataUnavailableError(
            f"none of {', '.join(spec.data.sources)} has text on this machine",
            hint="put the files there; it is tried again by itself",
        )
    positions_file = data_dir(run_dir) / "positions.json"
    return Feed(spec, peer_seed, corpus, streams=streams, positions_file=positions_file)


def _open_stream(
    spec: RunSpec,
    peer_seed: bytes,
    run_dir: Path,
    tokenizer: Tokenizer,
    number: int,
    source: Source,
    open_dataset: OpenDataset,
) -> Stream:
    dataset = open_dataset(source, data_dir(run_dir) / "hub")
    fraction = spec.data.held_out_fraction

    def pieces_from(start: int) -> Iterator[Piece]:
        pieces = held_out_pieces(dataset, fraction, held_out_bytes(spec))
        return (piece for piece in pieces if piece.position > start)

    def prepare_held_out() -> None:
        token_cache(run_dir).build(
            stream_key(spec, source),
            pieces_from,
            tokenizer,
            max_bytes=_HELD_OUT_MAX_BYTES,
            name=source.text,
        )

    reader = WindowReader(
        dataset,
        tokenizer,
        key=f"{spec.run_id}/{peer_seed.hex()}/{number}",
        name=source.text,
        fraction=fraction,
        context_tokens=spec.model.context_tokens,
    )
    return Stream(source.text, reader, prepare_held_out)
