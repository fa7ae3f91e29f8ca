"""From text to tokens and back: bytes, or the `tokenizer.json` that a RunSpec names by its hash.

Runs in: trainer (texts), sampler (prompts), export. A tokenizer's file comes from strangers: it is
data, checked for its size, its hash, its JSON's depth and its number of tokens before the library
`tokenizers` (an extra of the package) is loaded.

Shape legend: N tokens of a piece of text.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from p2p.blobstore import BlobStore
from p2p.errors import BlobUnavailableError
from volunteer.errors import DataUnavailableError, RunSpecError, VolunteerError
from volunteer.run import RunSpec

MAX_TOKENIZER_BYTES = 32 * 1024 * 1024
MAX_GROWTH = 1024
"""How many characters one of a text may become: those of published tokenizers stay below ten."""
_MAX_TOKEN_BYTES = 2**16 - 1
_INSTALL = "pipx inject allmende tokenizers"


class UnreadableTextError(DataUnavailableError):
    """The run's tokenizer cannot read a text, and never will."""


Tokens = npt.NDArray[np.unsignedinteger[Any]]
"""uint8 where tokens are bytes; else uint16 or uint32, as the vocabulary needs."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A piece of text as tokens."""

    tokens: Tokens
    """Shape (N,)."""
    num_bytes: npt.NDArray[np.uint16] | None
    """Bytes of text that each token covers, shape (N,), their sum the piece's; None: one each."""


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    id: str
    """As in `data.tokenizer`."""
    dtype: np.dtype[np.unsignedinteger[Any]]

    def encode(self, text: bytes) -> EncodedText:
        """Return the tokens of `text`; what is not UTF-8 in it is replaced or kept.

        Raises:
            UnreadableTextError: this text cannot be read.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return what `tokens` stand for."""
        ...


class BytesTokenizer:
    """A byte is a token."""

    id: str = "bytes"
    dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(np.uint8)

    def encode(self, text: bytes) -> EncodedText:
        """Return the bytes."""
        return EncodedText(np.frombuffer(text, dtype=np.uint8), None)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes."""
        return bytes(tokens)


class JsonTokenizer:
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, spec: RunSpec, content: bytes) -> None:
        """Load it.

        Args:
            spec: the run, whose model has to have room for its tokens.
            content: the file, whose hash was verified.

        Raises:
            RunSpecError: it is no tokenizer, or has more tokens than the model.
            DataUnavailableError: the library is not installed.
        """
        self.id = spec.data.tokenizer
        self._library = _load(content)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        num_tokens = 1 + max(vocabulary.values(), default=-1)
        if not 0 < num_tokens <= spec.model.vocab_size:
            raise RunSpecError(
                f"the run's tokenizer has {num_tokens} tokens, and model.vocab_size is"
                f" {spec.model.vocab_size}"
            )
        self.dtype: np.dtype[np.unsignedinteger[Any]] = np.dtype(
            np.uint16 if spec.model.vocab_size <= 2**16 else np.uint32
        )

    def encode(self, text: bytes) -> EncodedText:
        """Return the tokens, without special ones at the ends.

        Raises:
            UnreadableTextError: the tokenizer has no tokens for this text, or fails at it.
        """
        decoded = text.decode("utf-8", errors="replace")
        with _failing_as(UnreadableTextError, "the run's tokenizer cannot read a text"):
            encoding = self._library.encode(decoded, add_special_tokens=False)
        tokens = np.array(encoding.ids, dtype=self.dtype)
        ends = np.array([end for _, end in encoding.offsets], dtype=np.int64)
        return EncodedText(tokens, _bytes_covered(decoded, ends))

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the text; what does not make characters is replaced.

        Raises:
            RunSpecError: the tokenizer fails at it.
        """
        with _failing_as(RunSpecError, "the run's tokenizer cannot write its tokens as text"):
            text: str = self._library.decode(list(tokens), skip_special_tokens=False)
        return text.encode()


def load_tokenizer(spec: RunSpec, store: BlobStore) -> Tokenizer:
    """Return the run's tokenizer.

    Args:
        spec: names it.
        store: has its file, unless tokens are bytes.

    Raises:
        DataUnavailableError: the file is not here yet, or the library is not installed.
        RunSpecError: the file is no tokenizer for this run.
    """
    content = tokenizer_file(spec, store)
    return BytesTokenizer() if content is None else JsonTokenizer(spec, content)


def tokenizer_file(spec: RunSpec, store: BlobStore) -> bytes | None:
    """Return the run's `tokenizer.json`, verified; None where tokens are bytes.

    Raises:
        DataUnavailableError: it is not here yet, or the disk has damaged it.
        RunSpecError: it is too large.
    """
    blob_id = spec.data.tokenizer_hash
    if not blob_id:
        return None
    try:
        if store.size_bytes(blob_id) > MAX_TOKENIZER_BYTES:
            raise RunSpecError(f"the run's tokenizer has more than {MAX_TOKENIZER_BYTES} bytes")
        if store.verify(blob_id):
            return store.file_of(blob_id).read_bytes()
        store.delete(blob_id)
    except BlobUnavailableError:
        pass
    raise DataUnavailableError(
        "the run's tokenizer is not on this disk yet: it is fetched from other members",
        hint="or put the file `tokenizer.json` beside the RunSpec file and start again",
    )


def _load(content: bytes) -> Any:  # noqa: ANN401 - the library has no types of its own
    verify_tokenizer_json(content)
    # One thread: the owner has said how many, and the library would take a core each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        import tokenizers
    except ImportError as error:
        raise DataUnavailableError(
            "this run's tokenizer needs the library `tokenizers`", hint=_INSTALL
        ) from error
    with _failing_as(RunSpecError, "the run's tokenizer cannot be loaded"):
        library = tokenizers.Tokenizer.from_buffer(content)
        library.no_padding()
        library.no_truncation()
    return library


@contextlib.contextmanager
def _failing_as(kind: type[VolunteerError], what: str) -> Iterator[None]:
    """Raise `kind` for whatever the library raises: its panics are not even `Exception`s."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower
        raise kind(f"{what}: {error}"[:500]) from error


class _Model(msgspec.Struct):
    dropout: float | None = None


class _Shape(msgspec.Struct):
    """What every `tokenizer.json` has at least."""

    version: str
    model: _Model
    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def verify_tokenizer_json(content: bytes) -> None:
    """Check that it is JSON at all, not nested without end, before native code parses it."""
    if len(content) > MAX_TOKENIZER_BYTES:
        raise RunSpecError(f"the run's tokenizer has more than {MAX_TOKENIZER_BYTES} bytes")
    try:
        shape = msgspec.json.decode(content, type=_Shape)
        parts = [msgspec.json.decode(part) for part in (shape.normalizer, shape.decoder)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RunSpecError(f"the run's tokenizer is no tokenizer.json: {error}") from error
    if shape.model.dropout:
        raise RunSpecError("the run's tokenizer has `dropout`: a text has to have the same tokens")
    if any(_growth(part) > MAX_GROWTH for part in parts):
        raise RunSpecError(
            f"the run's tokenizer makes more than {MAX_GROWTH} characters of one (`Replace`)"
        )


def _growth(part: object) -> int:
    """Return what all replacements of a normalizer or decoder can make of one character."""
    growth, rest = 1, [part]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            if isinstance(one.get("content"), str):
                growth *= 1 + len(one["content"])
            rest.extend(one.values())
        elif isinstance(one, list):
            rest.extend(one)
    return growth


def _bytes_covered(text: str, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """Return the UTF-8 bytes up to each token's end that no token before it has covered.

    What no token covers, as white space that is left out, counts for the next one, and at the end
    for the last. Of several tokens of one character, as in byte-level BPE, the first has its bytes.

    Args:
        text: the piece.
        ends: index of the character after each token, shape (N,).
    """
    codes = np.frombuffer(text.encode("utf-32-le", errors="replace"), dtype="<u4")
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    places = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(widths)))
    reached = np.maximum.accumulate(np.clip(ends, 0, len(codes)))
    if len(reached):
        reached[-1] = len(codes)
    covered = np.diff(places[reached], prepend=0)
    return np.minimum(covered, _MAX_TOKEN_BYTES).astype(np.uint16)
