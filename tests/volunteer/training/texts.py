"""Texts, tokenizers and runs for the tests of data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from p2p.blobstore import BlobStore, blob_id_of_bytes
from tests.volunteer.training.tiny_run import tiny_spec
from volunteer.run import RunSpec
from volunteer.training.sources.builtin_texts import read_builtin_text
from volunteer.training.tokenizer import BytesTokenizer, EncodedText, UnreadableTextError

VOCABULARY = 400


def milton(num_bytes: int, start: int = 0) -> str:
    """Return a part of a text of the package."""
    return (
        read_builtin_text("milton")[start : start + num_bytes].tobytes().decode("ascii", "ignore")
    )


def bpe_tokenizer(num_tokens: int = VOCABULARY) -> bytes:
    """Return the tokenizer.json of a byte-level BPE that was trained on a few lines."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([milton(100_000)], trainer)
    return tokenizer.to_str().encode()


def run_on(
    *sources: str,
    tokenizer: bytes | None = None,
    held_out_fraction: float = 0.2,
    vocab_size: int = VOCABULARY,
) -> RunSpec:
    """Return the tiny run on other sources."""
    spec = tiny_spec()
    data = msgspec.structs.replace(
        spec.data,
        sources=sources,
        held_out_fraction=held_out_fraction,
        tokenizer="bytes" if tokenizer is None else f"json:{blob_id_of_bytes(tokenizer)}",
    )
    if tokenizer is not None:
        model = msgspec.structs.replace(spec.model, vocab_size=vocab_size)
        spec = msgspec.structs.replace(spec, model=model)
    return msgspec.structs.replace(spec, data=data)


def store_in(run_dir: Path) -> BlobStore:
    """Return the blob store of a run's folder."""
    return BlobStore(run_dir / "modules" / "dense" / "blobs")


def write_json_lines(file: Path, documents: Sequence[str]) -> None:
    """Write documents, a line each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": text, "url": "x"}) + "\n" for text in documents)
    file.write_text("".join(lines), "utf-8")


class FailingTokenizer(BytesTokenizer):
    """Fails at texts that have a certain word in them, and repeats them as it does."""

    def __init__(self, word: bytes = b"BAD") -> None:
        self.word = word

    def encode(self, text: bytes) -> EncodedText:
        """Return the bytes themselves, or fail."""
        if self.word in text:
            raise UnreadableTextError(f"no tokens for this: {text!r}")
        return super().encode(text)


def documents(num: int, num_bytes: int = 300) -> list[str]:
    """Return `num` documents, no two alike."""
    return [f"{i}: {milton(num_bytes, start=i * num_bytes)}" for i in range(num)]
