"""Windows out of a stream of documents, read ahead in a thread, from a place of one's own on.

Runs in: trainer. A stream can only be read from its beginning, so each volunteer begins at another
file of it, and in that one at another document; both are functions of (run_id, peer_seed). Where it
is, is a `StreamPosition`: the trainer keeps it with its snapshots, and goes on there.

What is held out of a stream are the first documents from its very beginning whose content's hash
says so, the same for every member; none of them is trained on by anyone.

Shape legend: T1 = context_tokens + 1.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from blake3 import blake3

from volunteer.errors import DataUnavailableError, VolunteerError
from volunteer.training.sources.documents import SEPARATOR, Piece, is_held_out
from volunteer.training.sources.skipping import SkippingTokenizer
from volunteer.training.tokenizer import Tokenizer, Tokens, UnreadableTextError

_START_CONTEXT = b"allmende/stream-start/1\x00"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""After an error, doubled each time until a document comes."""
MAX_HELD_OUT_DOCUMENTS = 200_000
"""Documents looked through for what is held out."""

_log = logging.getLogger(__name__)


class Dataset(Protocol):
    """What is streamed; every method may raise DataUnavailableError."""

    def num_shards(self) -> int:
        """Return the number of files."""
        ...

    def documents_per_shard(self) -> int:
        """Return about how many documents a file has."""
        ...

    def read(self, shard: int, start: int) -> Iterator[str]:
        """Yield the documents of a file from number `start` on."""
        ...

    def close(self) -> None:
        """Forget what is open."""
        ...


class StreamPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Where the next window begins."""

    num_files: int = -1
    """Files that were read to their end, over all passes; -1: nothing was read yet."""
    document: int = 0
    """In the present file."""
    token: int = 0
    """In that document."""


@dataclass(frozen=True, slots=True)
class StreamWindow:
    """One window, and where the next one begins."""

    tokens: Tokens
    """Shape (T1,)."""
    position: StreamPosition


def held_out_pieces(dataset: Dataset, fraction: float, num_bytes: int) -> Iterator[Piece]:
    """Yield the held-out documents from the beginning of a stream, `num_bytes` of text at least.

    Raises:
        DataUnavailableError: the stream cannot be read.
    """
    num_seen = num_found = 0
    for shard in range(dataset.num_shards()):
        for text in dataset.read(shard, 0):
            document = text.encode("utf-8", errors="replace")
            num_seen += 1
            if is_held_out(document, fraction):
                num_found += len(document)
                yield Piece(document + SEPARATOR, True, num_seen)
            if num_found >= num_bytes or num_seen >= MAX_HELD_OUT_DOCUMENTS:
                return


class WindowReader:
    """Cuts a stream into windows. One thread at a time."""

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        *,
        key: str,
        name: str,
        fraction: float,
        context_tokens: int,
    ) -> None:
        """Nothing is read yet.

        Args:
            dataset: the stream.
            tokenizer: makes tokens of it.
            key: of run and volunteer; says where they begin.
            name: of the source, for the log.
            fraction: of the documents that are held out.
            context_tokens: of the model.
        """
        self._dataset = dataset
        self._tokenizer = SkippingTokenizer(tokenizer, name)
        self._dtype = tokenizer.dtype
        self._key = key
        self._fraction = fraction
        self._window = context_tokens + 1

    def read_from(self, position: StreamPosition) -> Iterator[StreamWindow]:
        """Yield windows for ever, each beginning with the last token of the one before.

        Raises:
            DataUnavailableError: the stream cannot be read, or has no document to train on.
            UnreadableTextError: most of its documents are nothing for the tokenizer.
        """
        buffer = np.empty(0, dtype=self._dtype)
        # Where each document lies in the buffer: the index that its first token would have.
        starts: list[tuple[int, StreamPosition]] = []
        skipped = position.token
        for place, text in self._documents(position):
            encoded = self._tokenizer.encode(text)
            if encoded is None:
                skipped = 0
                continue
            starts.append((len(buffer) - skipped, place))
            buffer = np.concatenate((buffer, encoded.tokens[skipped:]))
            skipped = 0
            while len(buffer) >= self._window:
                window, buffer = buffer[: self._window], buffer[self._window - 1 :]
                starts = [(start - self._window + 1, each) for start, each in starts]
                while len(starts) > 1 and starts[1][0] <= 0:
                    del starts[0]
                start, first = starts[0]
                yield StreamWindow(window, msgspec.structs.replace(first, token=-start))

    def _documents(self, position: StreamPosition) -> Iterator[tuple[StreamPosition, bytes]]:
        """Yield the documents to train on, each with its place, pass after pass."""
        num_shards = self._dataset.num_shards()
        draws = blake3(_START_CONTEXT + self._key.encode()).digest(length=16)
        first_shard = int.from_bytes(draws[:8], "little") % num_shards
        if position.num_files < 0:
            document = int.from_bytes(draws[8:], "little") % self._dataset.documents_per_shard()
            position = StreamPosition(num_files=0, document=document)
        num_empty = 0
        for num_files in itertools.count(position.num_files):
            start = position.document if num_files == position.num_files else 0
            shard = (first_shard + num_files) % num_shards
            is_empty = True
            for number, text in enumerate(self._dataset.read(shard, start), start=start):
                document_bytes = text.encode("utf-8", errors="replace")
                if not is_held_out(document_bytes, self._fraction):
                    is_empty = False
                    place = StreamPosition(num_files=num_files, document=number)
                    yield place, document_bytes + SEPARATOR
            num_empty = num_empty + 1 if is_empty else 0
            if num_empty > num_shards:
                raise DataUnavailableError("the dataset has no document to train on")


class StreamAhead:
    """Reads windows ahead of the trainer, and tries again where the network fails."""

    def __init__(
        self,
        name: str,
        reader: WindowReader,
        prepare: Callable[[], None],
        position: StreamPosition,
        *,
        num_ahead: int,
    ) -> None:
        """Begin to read.

        Args:
            name: of the source, for the log.
            reader: cuts the windows.
            prepare: called before the first one, and again until it raises no more.
            position: where to begin.
            num_ahead: windows that are kept ready.
        """
        self._name = name
        self._reader = reader
        self._prepare = prepare
        self._windows: queue.Queue[StreamWindow] = queue.Queue(max(1, num_ahead))
        self._stop = threading.Event()
        self.problem = ""
        """Why nothing comes; empty while it does."""
        self.failure: UnreadableTextError | None = None
        """Why nothing will come any more."""
        self._thread = threading.Thread(
            target=self._run, args=(position,), name="stream", daemon=True
        )
        self._thread.start()

    def take(self, timeout_s: float) -> StreamWindow | None:
        """Return the next window, as soon as there is one; None if none comes in time."""
        try:
            return self._windows.get(timeout=timeout_s) if timeout_s else self._windows.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop reading; what is being fetched just then may go on until it has come or failed."""
        self._stop.set()
        while self.take(0.0) is not None:  # it may be waiting for room
            pass

    def _run(self, position: StreamPosition) -> None:
        pause_s, is_prepared = FIRST_PAUSE_S, False
        while not self._stop.is_set():
            try:
                if not is_prepared:
                    self._prepare()
                    is_prepared = True
                for window in self._reader.read_from(position):
                    if not self._put(window):
                        return
                    position = window.position
                    self.problem, pause_s = "", FIRST_PAUSE_S
            except UnreadableTextError as error:  # it would fail again, each time
                self.problem, self.failure = str(error), error
                return
            except (VolunteerError, OSError) as error:  # a full disk, too, may have room later
                hint = error.hint if isinstance(error, VolunteerError) else ""
                self.problem = f"{error} ({hint})" if hint else str(error)
                _log.warning("%s: tried again in %.0f s: %s", self._name, pause_s, error)
                self._stop.wait(pause_s)
                pause_s = min(LONGEST_PAUSE_S, 2.0 * pause_s)

    def _put(self, window: StreamWindow) -> bool:
        while not self._stop.is_set():
            try:
                self._windows.put(window, timeout=1.0)
            except queue.Full:
                continue
            return True
        return False
