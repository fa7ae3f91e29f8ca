"""Single texts that the tokenizer fails at are left out of files too, private ones in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.volunteer.training.texts import FailingTokenizer, run_on, write_json_lines
from volunteer.local_data import LocalData
from volunteer.training.data import load_corpus
from volunteer.training.sources.documents import Piece
from volunteer.training.sources.prepare import prepare
from volunteer.training.sources.skipping import AT_LEAST, SkippingTokenizer
from volunteer.training.sources.token_cache import TokenCache
from volunteer.training.tokenizer import UnreadableTextError

KEY = "ab" * 32


def pieces(*texts: bytes) -> list[Piece]:
    return [Piece(text, False, number) for number, text in enumerate(texts, start=1)]


def build(folder: Path, found: list[Piece], name: str = "file:/x") -> bytes:
    def pieces_from(start: int) -> Iterator[Piece]:
        return iter(found[start:])

    cache = TokenCache(folder)
    cache.build(KEY, pieces_from, FailingTokenizer(), max_bytes=2**20, name=name)
    opened = cache.open(KEY)
    assert opened is not None
    return opened.training.tobytes()


def test_what_can_be_read_of_a_file_is_kept(tmp_path: Path) -> None:
    assert build(tmp_path, pieces(b"one ", b"BAD ", b"two ", b"BAD", b"three")) == b"one two three"


def test_a_file_of_which_nothing_can_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UnreadableTextError, match="cannot read any of it"):
        build(tmp_path, pieces(b"BAD", b"BAD too"))


def test_half_of_the_last_texts_may_fail_and_no_more() -> None:
    tokenizer = SkippingTokenizer(FailingTokenizer(), "hf:a/b")
    for _ in range(AT_LEAST):
        assert tokenizer.encode(b"good") is not None
        assert tokenizer.encode(b"BAD") is None
    with pytest.raises(UnreadableTextError, match="hf:a/b: 21 of the last 41 texts cannot be read"):
        tokenizer.encode(b"BAD")
    assert (tokenizer.num_read, tokenizer.num_skipped) == (AT_LEAST, AT_LEAST + 1)


def test_of_a_private_text_nothing_is_told_but_that_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    private = tmp_path / "diary"
    private.mkdir()
    texts = [f"secret {i} {'BAD' if i < 3 else 'good'} end" for i in range(40)]
    write_json_lines(private / "a.jsonl", texts)
    spec = run_on("builtin:milton", "private:")
    run_dir = tmp_path / "run"
    prepare(spec, run_dir, FailingTokenizer(), LocalData(private_dir=str(private)), lambda: None)
    corpus = load_corpus(spec.data, run_dir)
    kept = corpus.texts[1].training.tobytes()
    assert b"BAD" not in kept
    assert b"secret 39 good end" in kept
    told = [record.getMessage() for record in caplog.records]
    assert told == ["a text of a private file cannot be read: left out"]
