"""Streams: a place of one's own to begin at, every document once, a position that says it all."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest

from tests.volunteer.training.texts import FailingTokenizer, documents
from volunteer.errors import DataUnavailableError, StorageFullError
from volunteer.training.sources.documents import SEPARATOR, is_held_out
from volunteer.training.sources.skipping import TOLD
from volunteer.training.sources.stream import (
    StreamAhead,
    StreamPosition,
    StreamWindow,
    WindowReader,
    held_out_pieces,
)
from volunteer.training.tokenizer import BytesTokenizer, Tokenizer, UnreadableTextError

CONTEXT = 16


class ListDataset:
    """Documents in memory, in files; fails when told to."""

    def __init__(self, shards: Sequence[Sequence[str]]) -> None:
        self.shards = shards
        self.failures = 0
        self.num_opened = 0

    def num_shards(self) -> int:
        return len(self.shards)

    def documents_per_shard(self) -> int:
        return max(1, len(self.shards[0]))

    def read(self, shard: int, start: int) -> Iterator[str]:
        self.num_opened += 1
        for text in self.shards[shard][start:]:
            if self.failures:
                self.failures -= 1
                raise DataUnavailableError("the line is dead")
            yield text

    def close(self) -> None:
        pass


BYTES = BytesTokenizer()


def reader_of(
    dataset: ListDataset, key: str = "me", fraction: float = 0.2, tokenizer: Tokenizer = BYTES
) -> WindowReader:
    return WindowReader(
        dataset, tokenizer, key=key, name="hf:a/b", fraction=fraction, context_tokens=CONTEXT
    )


def take(reader: WindowReader, num: int, position: StreamPosition) -> list[StreamWindow]:
    return list(itertools.islice(reader.read_from(position), num))


def shards(num_shards: int, per_shard: int, num_bytes: int = 70) -> list[list[str]]:
    texts = documents(num_shards * per_shard, num_bytes)
    return [texts[i * per_shard : (i + 1) * per_shard] for i in range(num_shards)]


BEGIN = StreamPosition(num_files=0)


def test_windows_are_the_text_of_the_documents_that_are_not_held_out() -> None:
    dataset = ListDataset([documents(30, 40)])
    kept = [text.encode() for text in dataset.shards[0] if not is_held_out(text.encode(), 0.2)]
    due = b"".join(text + SEPARATOR for text in kept)
    windows = take(reader_of(dataset), len(due) // CONTEXT - 1, BEGIN)
    joined = windows[0].tokens.tobytes() + b"".join(w.tokens.tobytes()[1:] for w in windows[1:])
    assert due.startswith(joined)
    assert len(joined) > len(due) - 3 * CONTEXT


@pytest.mark.parametrize("num_bytes", [3, 15, 16, 17, 200])
def test_reading_goes_on_at_every_position_exactly(num_bytes: int) -> None:
    dataset = ListDataset(shards(3, 5, num_bytes))
    reader = reader_of(dataset)
    whole = take(reader, 60, StreamPosition())
    for i in range(59):
        as_json = msgspec.json.encode(whole[i].position)  # as it is kept
        position = msgspec.json.decode(as_json, type=StreamPosition)
        again = take(reader, min(10, 59 - i), position)
        for window, due in zip(again, whole[i + 1 :], strict=False):
            assert np.array_equal(window.tokens, due.tokens)
            assert window.position == due.position


def test_a_document_that_the_tokenizer_fails_at_is_skipped_and_told_once_or_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    texts = [
        f"document {i}, which goes on for a while {'BAD' if i % 9 == 4 else ''}" for i in range(90)
    ]
    reader = reader_of(ListDataset([texts]), fraction=1e-9, tokenizer=FailingTokenizer(b"BAD"))
    windows = take(reader, 200, BEGIN)
    text = b"".join(window.tokens.tobytes()[1:] for window in windows)
    assert b"BAD" not in text
    assert all(f"document {i},".encode() in text for i in range(1, 50) if i % 9 != 4)
    told = [record for record in caplog.records if "left out" in record.message]
    assert len(told) == 5 == TOLD
    again = take(reader, 10, windows[99].position)
    assert [w.tokens.tobytes() for w in again] == [w.tokens.tobytes() for w in windows[100:110]]


def test_a_tokenizer_that_fails_at_most_documents_ends_the_stream_with_the_reason() -> None:
    reader = reader_of(ListDataset(shards(1, 30)), tokenizer=FailingTokenizer(b": "))
    with pytest.raises(UnreadableTextError, match=r"hf:a/b: \d+ of the last \d+ texts cannot"):
        take(reader, 500, BEGIN)
    ahead = StreamAhead("hf:a/b", reader, lambda: None, BEGIN, num_ahead=1)
    deadline = time.monotonic() + 20.0
    while ahead.failure is None and time.monotonic() < deadline:
        ahead.take(0.01)
    assert "no tokens for this" in str(ahead.failure)


def test_volunteers_begin_at_files_and_documents_of_their_own() -> None:
    dataset = ListDataset(shards(8, 40))
    firsts = {
        take(reader_of(dataset, key=f"peer{i}"), 1, StreamPosition())[0].tokens.tobytes()
        for i in range(30)
    }
    assert len(firsts) >= 26  # of 320 places, 0.7 pairs of 30 meet


def test_in_a_pass_every_document_of_every_file_is_read() -> None:
    dataset = ListDataset(shards(4, 10))
    reader = reader_of(dataset, fraction=1e-9)
    per_pass = sum(len(text) + len(SEPARATOR) for shard in dataset.shards for text in shard)
    windows = take(reader, 2 * per_pass // CONTEXT, StreamPosition())
    text = b"".join(window.tokens.tobytes()[1:] for window in windows).decode()
    marks = [f"{i}: " for i in range(40)]
    assert all(mark in text for mark in marks)


def test_what_is_held_out_is_the_same_for_all_and_read_by_nobody() -> None:
    dataset = ListDataset(shards(3, 30))
    pieces = list(held_out_pieces(dataset, 0.2, num_bytes=600))
    assert 600 <= sum(len(piece.text) for piece in pieces) < 1000
    assert all(piece.is_held_out for piece in pieces)
    positions = [piece.position for piece in pieces]
    assert positions == sorted(set(positions))
    windows = take(reader_of(dataset), 700, StreamPosition())
    read = b"".join(window.tokens.tobytes()[1:] for window in windows)
    assert all(piece.text not in read for piece in pieces)


def test_a_dataset_without_a_document_to_train_on_is_told() -> None:
    for dataset in (ListDataset([[], []]), ListDataset([["held out by chance"]])):
        with pytest.raises(DataUnavailableError, match="no document to train on"):
            take(reader_of(dataset, fraction=1.0 - 2**-53), 1, StreamPosition())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volunteer.training.sources.stream.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("volunteer.training.sources.stream.LONGEST_PAUSE_S", 0.0)


@pytest.mark.usefixtures("quick")
def test_after_an_error_it_goes_on_where_it_was(caplog: pytest.LogCaptureFixture) -> None:
    dataset = ListDataset(shards(2, 30))
    due = take(reader_of(dataset), 40, StreamPosition())
    tries = iter(range(2))

    def prepare() -> None:
        if next(tries, None) is not None:
            raise DataUnavailableError("not yet", hint="wait")

    ahead = StreamAhead("hf:x", reader_of(dataset), prepare, StreamPosition(), num_ahead=4)
    found = []
    for i in range(40):
        dataset.failures = 3 if i % 10 == 5 else dataset.failures
        window = ahead.take(10.0)
        assert window is not None
        found.append(window)
    ahead.close()
    assert [w.tokens.tobytes() for w in found] == [w.tokens.tobytes() for w in due]
    assert [w.position for w in found] == [w.position for w in due]
    assert "hf:x: tried again in 0 s: not yet" in caplog.text
    assert "the line is dead" in caplog.text


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (DataUnavailableError("no route", hint="plug it in"), "no route (plug it in)"),
        (StorageFullError("no room", hint="make some"), "no room (make some)"),
        (OSError(5, "Input/output error"), "[Errno 5] Input/output error"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.usefixtures("quick")
def test_what_is_wrong_is_said_until_something_comes(error: Exception, problem: str) -> None:
    dataset, may_go_on = ListDataset(shards(1, 30)), threading.Event()
    tried, failed = threading.Event(), threading.Event()

    def prepare() -> None:
        if not may_go_on.is_set():
            (failed if tried.is_set() else tried).set()
            raise error

    ahead = StreamAhead("hf:x", reader_of(dataset), prepare, StreamPosition(), num_ahead=1)
    assert failed.wait(10.0)
    assert ahead.problem == problem
    assert ahead.take(0.0) is None
    may_go_on.set()
    assert ahead.take(10.0) is not None
    assert ahead.take(10.0) is not None  # by now the first has been noted
    assert ahead.problem == ""
    ahead.close()


def test_it_reads_no_further_ahead_than_told() -> None:
    dataset = ListDataset([documents(500, 40)])
    reached: list[int] = []

    class Watched(WindowReader):
        def read_from(self, position: StreamPosition) -> Iterator[StreamWindow]:
            for window in super().read_from(position):
                reached.append(1)
                yield window

    reader = Watched(dataset, BYTES, key="", name="hf:x", fraction=0.2, context_tokens=CONTEXT)
    ahead = StreamAhead("hf:x", reader, lambda: None, BEGIN, num_ahead=5)
    for _ in range(10):
        assert ahead.take(10.0) is not None
    ahead.close()
    assert len(reached) <= 10 + 5 + 2
