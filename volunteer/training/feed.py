"""What each inner step reads: windows of texts, of streams, or of both; and where the streams are.

Runs in: trainer. Stage 1 of a round.

Texts that can be read at any place need no position: data.py. Where a run has streams, each row of
a batch is of any of its sources, all equally likely, as a counter says. A stream that gives nothing
just then is stood in for by the texts; without any, the trainer waits, and ends with the reason
when that takes too long.

Positions are saved before each snapshot, by inner step; a restart takes the one of its snapshot: it
reads what it had read after it again, as it takes those steps again, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from volunteer.errors import DataUnavailableError, RunSpecError
from volunteer.files import replace_file
from volunteer.run import RunSpec
from volunteer.training.data import Corpus, Tokens, training_windows
from volunteer.training.sources.stream import StreamAhead, StreamPosition, WindowReader

_SOURCES_CONTEXT = b"allmende/sources/1\x00"
PATIENCE_S = 1.0
"""That a step waits for streams, where texts can stand in for them."""
LONGEST_WAIT_S = 60.0
"""That it waits where nothing can; the agent watches that steps are taken, for 300 s."""
_LOOK_EVERY_S = 0.2
_POSITIONS_KEPT = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stream:
    """A source that is read from its beginning on."""

    name: str
    """As the RunSpec has it."""
    reader: WindowReader
    prepare: Callable[[], None]
    """Has what is held out of it on the disk."""


class _Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Where the streams were after `inner_step` steps, in the RunSpec's order."""

    inner_step: int
    positions: tuple[StreamPosition, ...]


class Feed:
    """The windows of one volunteer in one run. One thread at a time."""

    def __init__(
        self,
        spec: RunSpec,
        peer_seed: bytes,
        corpus: Corpus,
        *,
        streams: Sequence[Stream] = (),
        positions_file: Path | None = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            spec: the run.
            peer_seed: makes this volunteer's windows its own.
            corpus: the texts.
            streams: the rest of the run's sources.
            positions_file: where the streams' positions are kept.
        """
        self._spec = spec
        self._peer_seed = peer_seed
        self._corpus = corpus
        self._has_texts = corpus.has_training_windows(spec.model.context_tokens)
        self._streams = streams
        self._positions_file = positions_file
        self._positions = [StreamPosition()] * len(streams)
        self._ahead: list[StreamAhead] = []

    def restore(self, inner_step: int) -> None:
        """Stand where a snapshot of `inner_step` steps stood, or at the beginning."""
        if not self._streams:
            return
        self.close()
        found = [saved for saved in self._read_saved() if saved.inner_step <= inner_step]
        if found:
            self._positions = list(max(found, key=lambda saved: saved.inner_step).positions)
        else:
            self._positions = [StreamPosition()] * len(self._streams)
        self._ahead = [
            StreamAhead(
                stream.name,
                stream.reader,
                stream.prepare,
                position,
                num_ahead=4 * self._spec.inner.batch_sequences,
            )
            for stream, position in zip(self._streams, self._positions, strict=True)
        ]

    def save(self, inner_step: int) -> None:
        """Keep where the streams are; to be called before a snapshot of `inner_step` steps.

        Raises:
            StorageFullError: what was kept stands.
        """
        if self._positions_file is None or not self._streams:
            return
        now = _Saved(inner_step=inner_step, positions=tuple(self._positions))
        others = [saved for saved in self._read_saved() if saved.inner_step != inner_step]
        kept = sorted((*others, now), key=lambda saved: saved.inner_step)[-_POSITIONS_KEPT:]
        replace_file(self._positions_file, msgspec.json.encode(kept))

    def close(self) -> None:
        """Stop reading ahead."""
        for ahead in self._ahead:
            ahead.close()
        self._ahead = []

    def windows(self, inner_step: int, should_stop: Callable[[], bool]) -> Tokens | None:
        """Return what inner step `inner_step` reads.

        Returns:
            Shape (B, T1); None if told to stop while it waited.

        Raises:
            RunSpecError: no text is long enough for a window, or the tokenizer fails at most texts
                of a stream.
            DataUnavailableError: a stream gives nothing, and nothing can stand in for it.
        """
        if not self._streams:
            return self._text_windows(inner_step)
        rows: list[Tokens] = [] if not self._has_texts else list(self._text_windows(inner_step))
        patience_s = PATIENCE_S
        for row, stream in enumerate(self._choose_streams(inner_step)):
            if stream is None:
                continue
            if not self._has_texts:
                window = self._wait_for(stream, should_stop)
                if window is None:
                    return None
                rows.append(window)
                continue
            window = self._take(stream, 0.0)
            if window is None and patience_s and not self._ahead[stream].problem:
                window, patience_s = self._take(stream, patience_s), 0.0
            if window is not None:
                rows[row] = window
        return np.stack(rows)

    def _text_windows(self, inner_step: int) -> Tokens:
        return training_windows(
            self._corpus,
            run_id=self._spec.run_id,
            peer_seed=self._peer_seed,
            inner_step=inner_step,
            num_sequences=self._spec.inner.batch_sequences,
            context_tokens=self._spec.model.context_tokens,
        )

    def _choose_streams(self, inner_step: int) -> list[int | None]:
        """Return for each row the stream that it comes from; None: a text."""
        key = f"{self._spec.run_id}/{self._peer_seed.hex()}/{inner_step}".encode()
        batch = self._spec.inner.batch_sequences
        draws = np.frombuffer(blake3(_SOURCES_CONTEXT + key).digest(length=8 * batch), dtype="<u8")
        num_streams = len(self._streams)
        num_texts = len(self._spec.data.sources) - num_streams if self._has_texts else 0
        sources = (int(draw % np.uint64(num_streams + num_texts)) for draw in draws)
        return [source if source < num_streams else None for source in sources]

    def _take(self, stream: int, timeout_s: float) -> Tokens | None:
        ahead = self._ahead[stream]
        window = ahead.take(timeout_s)
        if window is None:
            if ahead.failure is not None:
                raise RunSpecError(str(ahead.failure)) from ahead.failure
            return None
        self._positions[stream] = window.position
        return window.tokens

    def _wait_for(self, stream: int, should_stop: Callable[[], bool]) -> Tokens | None:
        """Return the next window of a stream; None if told to stop.

        Raises:
            DataUnavailableError: none comes.
        """
        for _ in range(int(LONGEST_WAIT_S / _LOOK_EVERY_S)):
            window = self._take(stream, _LOOK_EVERY_S)
            if window is not None:
                return window
            if should_stop():
                return None
        reason = self._ahead[stream].problem or f"{self._streams[stream].name} gives nothing"
        raise DataUnavailableError(reason)

    def _read_saved(self) -> tuple[_Saved, ...]:
        """Return what was kept, of as many streams as there are."""
        if self._positions_file is None:
            return ()
        try:
            content = self._positions_file.read_bytes()
            saved = msgspec.json.decode(content, type=tuple[_Saved, ...])
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            # Some text is read twice: better than not to train at all.
            _log.warning(
                "positions lost, streams begin anew file=%s: %s", self._positions_file, error
            )
            return ()
        return tuple(each for each in saved if len(each.positions) == len(self._streams))
