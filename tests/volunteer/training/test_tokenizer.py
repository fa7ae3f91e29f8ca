"""Tokenizers: what they cover is all of the text, and a hostile file is an error and no more."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from p2p.blobstore import BlobStore
from tests.volunteer.training.texts import VOCABULARY, bpe_tokenizer, milton, run_on, store_in
from volunteer.errors import DataUnavailableError, RunSpecError
from volunteer.messages import Generate
from volunteer.training.export import Provenance, export
from volunteer.training.genesis import genesis_slices
from volunteer.training.layout import num_parameters
from volunteer.training.model import weights_of
from volunteer.training.sample import answer, generate_tokens
from volunteer.training.state import read_state, write_state_slices
from volunteer.training.tokenizer import (
    MAX_TOKENIZER_BYTES,
    BytesTokenizer,
    JsonTokenizer,
    load_tokenizer,
    tokenizer_file,
)

CONTENT = bpe_tokenizer()
SPEC = run_on("builtin:milton", tokenizer=CONTENT)
TOKENIZER = JsonTokenizer(SPEC, CONTENT)


@given(text=st.text(max_size=60))
@settings(max_examples=60)
def test_tokens_cover_every_byte_once_and_come_back_as_the_text(text: str) -> None:
    encoded = TOKENIZER.encode(text.encode("utf-8", "replace"))
    assert encoded.num_bytes is not None
    assert len(encoded.tokens) == len(encoded.num_bytes)
    assert int(encoded.num_bytes.sum()) == len(text.encode("utf-8", "replace"))
    assert TOKENIZER.decode(encoded.tokens.tolist()) == text.encode("utf-8", "replace")


def test_tokens_are_fewer_than_bytes_and_as_small_as_the_vocabulary_allows() -> None:
    text = milton(5000).encode()
    encoded = TOKENIZER.encode(text)
    assert len(encoded.tokens) < 0.7 * len(text)
    assert encoded.tokens.dtype == np.uint16
    wide = run_on("builtin:milton", tokenizer=CONTENT, vocab_size=2**17)
    assert JsonTokenizer(wide, CONTENT).encode(text).tokens.dtype == np.uint32


def test_what_a_tokenizer_leaves_out_counts_for_the_next_token() -> None:
    words = tokenizers.Tokenizer(models.WordLevel({"the": 0, "sea": 1, "?": 2}, unk_token="?"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    content = words.to_str().encode()
    encoded = JsonTokenizer(run_on("builtin:milton", tokenizer=content), content).encode(
        "  The  séa  sea \n".encode()
    )
    assert encoded.tokens.tolist() == [0, 2, 1]
    assert encoded.num_bytes is not None
    assert encoded.num_bytes.tolist() == [5, 6, 7]  # of 18 bytes


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["", "the sea"])
def test_a_sample_is_written_and_exported_in_the_runs_tokenizer(
    tmp_path: Path, prompt: str
) -> None:
    run_dir = tmp_path / "run"
    store = store_in(run_dir)
    store.add_bytes(CONTENT)
    state_hash = write_state_slices(genesis_slices(SPEC), num_parameters(SPEC.model), store)
    found = answer(SPEC, store, state_hash, Generate(prompt=prompt, max_tokens=9, seed=2))
    start = TOKENIZER.encode(prompt.encode() or b"\n").tokens.tolist()
    state = read_state(store.file_of(state_hash), num_parameters(SPEC.model))
    weights = weights_of(state.weights_P, SPEC.model)
    due = generate_tokens(weights, SPEC.model, start, num_tokens=9, temperature=0.7, seed=2)
    assert (found.text, found.num_tokens) == (TOKENIZER.decode(due).decode(), 9)
    folder = tmp_path / "model"
    export(run_dir, "dense", Provenance(SPEC, state_hash, 0), folder)
    assert (folder / "tokenizer.json").read_bytes() == CONTENT
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded("the sea")["input_ids"] == TOKENIZER.encode(b"the sea").tokens.tolist()


def test_bytes_are_tokens() -> None:
    encoded = BytesTokenizer().encode(b"\x00a\xff")
    assert (encoded.tokens.tolist(), encoded.num_bytes) == ([0, 97, 255], None)
    assert BytesTokenizer().decode([0, 97, 255]) == b"\x00a\xff"


def test_more_tokens_than_the_model_has_are_refused() -> None:
    with pytest.raises(RunSpecError, match=f"has {VOCABULARY} tokens, and model.vocab_size is 399"):
        JsonTokenizer(run_on("builtin:milton", tokenizer=CONTENT, vocab_size=399), CONTENT)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"version": "1.0", "model": {}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b c"]}}',
        b'{"version": "1.0", "model": ' + b"[" * 100_000,
        b'{"version": "1.0", "model": {"type": "Evil", "code": "import os"}}',
        json.dumps(
            {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
        ).encode(),
        CONTENT[: len(CONTENT) // 2],
        b" " * (MAX_TOKENIZER_BYTES + 1),
    ],
    ids=range(12),
)
def test_a_hostile_file_is_an_error_of_the_run(content: bytes) -> None:
    with pytest.raises(RunSpecError, match="tokenizer"):
        JsonTokenizer(SPEC, content)


@pytest.mark.parametrize(
    "part",
    [
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "no such"}},
        {
            "pre_tokenizer": {
                "type": "Split",
                "pattern": {"Regex": "(a+)+$"},
                "behavior": "Isolated",
                "invert": False,
            }
        },
    ],
    ids=["has no token for it", "panics"],
)
def test_a_text_that_the_library_fails_at_is_an_error_of_the_text(part: dict[str, object]) -> None:
    tokenizer = JsonTokenizer(SPEC, json.dumps(json.loads(CONTENT) | part).encode())
    with pytest.raises(DataUnavailableError, match="tokenizer cannot read a text"):
        tokenizer.encode(b"a" * 26 + b"b")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"model": json.loads(CONTENT)["model"] | {"dropout": 0.1}}, "dropout"),
        (
            {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 2000}},
            "Replace",
        ),
        (
            {
                "decoder": {
                    "type": "Sequence",
                    "decoders": 3
                    * [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 20}],
                }
            },
            "Replace",
        ),
    ],
    ids=["by chance", "one large", "one after the other"],
)
def test_what_makes_other_tokens_each_time_or_texts_without_end_is_refused(
    part: dict[str, object], said: str
) -> None:
    with pytest.raises(RunSpecError, match=said):
        JsonTokenizer(SPEC, json.dumps(json.loads(CONTENT) | part).encode())
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "\N{LOWER ONE EIGHTH BLOCK}"}
    usual = json.loads(CONTENT) | {"normalizer": space}
    assert JsonTokenizer(SPEC, json.dumps(usual).encode()).encode(b"a b").tokens.size


def test_a_tokenizer_that_panics_when_loaded_is_an_error_of_the_run() -> None:
    part = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    with pytest.raises(RunSpecError, match="tokenizer cannot be loaded"):
        JsonTokenizer(SPEC, json.dumps(json.loads(CONTENT) | part).encode())


def test_the_file_comes_from_the_store_and_is_verified_each_time(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(DataUnavailableError, match="not on this disk yet"):
        load_tokenizer(SPEC, store)
    blob_id = store.add_bytes(CONTENT)
    assert blob_id == SPEC.data.tokenizer_hash
    assert tokenizer_file(SPEC, store) == CONTENT
    assert load_tokenizer(SPEC, store).encode(b"the sea").tokens.tolist()
    store.file_of(blob_id).write_bytes(CONTENT[:-1] + b" ")
    with pytest.raises(DataUnavailableError, match="not on this disk yet"):
        load_tokenizer(SPEC, store)
    assert not store.has(blob_id)  # fetched anew
    assert tokenizer_file(run_on("builtin:milton"), store) is None
