"""Leaves out single texts that the run's tokenizer fails at, with a word, and not most of them.

Runs in: trainer. The same text fails on every machine, so what is held out stays the same for all.
"""

from __future__ import annotations

import logging
from collections import deque

from volunteer.training.tokenizer import EncodedText, Tokenizer, UnreadableTextError

LOOKED_AT = 100
"""The last texts, of which at most half may fail."""
AT_LEAST = 20
"""So many are looked at before they are judged."""
TOLD, TOLD_EVERY = 5, 1000
"""The first few are told in the log, and then seldom."""

_log = logging.getLogger(__name__)


class SkippingTokenizer:
    """Makes tokens of the texts of one source, and skips those that cannot be read."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        """Nothing has failed yet; `name` is the source's, for the log; empty: it is private."""
        self._tokenizer = tokenizer
        self._name = name
        self._last: deque[bool] = deque(maxlen=LOOKED_AT)
        self.num_read = 0
        self.num_skipped = 0

    def encode(self, text: bytes) -> EncodedText | None:
        """Return the tokens of a text; None: it is skipped.

        Raises:
            UnreadableTextError: most of the last ones cannot be read.
        """
        try:
            encoded = self._tokenizer.encode(text)
        except UnreadableTextError as error:
            self._note_skipped(error)
            return None
        self.num_read += 1
        self._last.append(True)
        return encoded

    def _note_skipped(self, error: UnreadableTextError) -> None:
        self.num_skipped += 1
        self._last.append(False)
        self._tell(error)
        num_failed = self._last.count(False)
        if len(self._last) >= AT_LEAST and 2 * num_failed > len(self._last):
            few = f"{num_failed} of the last {len(self._last)} texts cannot be read"
            raise UnreadableTextError(
                f"{self._name or 'a private file'}: {few}: {error}"
            ) from error

    def _tell(self, error: UnreadableTextError) -> None:
        num = self.num_skipped
        if not self._name:
            if num == 1:  # nothing of what is private, the library's words for it included
                _log.warning("a text of a private file cannot be read: left out")
        elif num <= TOLD or num % TOLD_EVERY == 0:
            _log.warning("%s: text left out, num_skipped=%d: %s", self._name, num, error)
