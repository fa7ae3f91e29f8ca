"""The data: held-out text stays unread, and the stream is a function of its key."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.run import DataSpec
from volunteer.training.data import (
    Corpus,
    Text,
    Tokens,
    builtin_names,
    held_out_windows,
    load_corpus,
    read_builtin_text,
    training_windows,
)


def constant_text(name: str, training: int, held_out: int, num: int) -> Text:
    return Text(
        name=name,
        training=np.full(num, training, dtype=np.uint8),
        held_out=np.full(num, held_out, dtype=np.uint8),
    )


def counting_corpus(num: int) -> Corpus:
    tokens = np.arange(num, dtype=np.uint8)
    return Corpus((Text(name="counting", training=tokens, held_out=tokens),))


def read(corpus: Corpus, inner_step: int = 0, *, run: str = "run", seed: bytes = b"a") -> Tokens:
    return training_windows(
        corpus,
        run_id=run,
        peer_seed=seed,
        inner_step=inner_step,
        num_sequences=16,
        context_tokens=8,
    )


def test_no_training_window_reaches_into_held_out_text_or_across_texts() -> None:
    corpus = Corpus((constant_text("a", 1, 101, 40), constant_text("b", 2, 102, 25)))
    seen: set[int] = set()
    for inner_step in range(200):
        for window in read(corpus, inner_step):
            assert len(set(window.tolist())) == 1  # of one part of one text
            seen.add(int(window[0]))
    assert seen == {1, 2}


def test_every_training_window_occurs_about_equally_often() -> None:
    corpus = counting_corpus(12)  # windows of 9 start at 0, 1, 2, 3
    starts = Counter(int(w[0]) for step in range(500) for w in read(corpus, step))
    assert set(starts) == {0, 1, 2, 3}
    assert all(abs(count - 2000) < 200 for count in starts.values())  # 5 standard deviations


def test_both_parts_of_the_real_texts_are_disjoint_and_complete() -> None:
    data = load_builtin_run("commons").data
    for text in load_corpus(data).texts:
        whole = read_builtin_text(text.name)
        assert len(text.held_out) == int(len(whole) * data.held_out_fraction) > 0
        assert np.array_equal(np.concatenate((text.training, text.held_out)), whole)


def test_the_stream_is_a_function_of_run_peer_and_step() -> None:
    corpus = load_corpus(DataSpec(sources=("builtin:milton",)))
    first = read(corpus)
    assert np.array_equal(first, read(corpus))
    others = [read(corpus, 1), read(corpus, run="other"), read(corpus, seed=b"b")]
    for other in others:
        assert not np.array_equal(first, other)
    assert first.shape == (16, 9)
    assert first.dtype == np.uint8


def test_the_stream_never_changes() -> None:
    """A change would have running volunteers read other windows after an update."""
    assert read(counting_corpus(200))[:6, 0].tolist() == [123, 62, 103, 148, 89, 118]


def test_held_out_windows_are_evenly_spread_over_every_text() -> None:
    windows = held_out_windows(counting_corpus(200), num_sequences=4, context_tokens=8)
    assert windows[:, 0].tolist() == [24, 72, 120, 168]  # of 192 windows
    two = Corpus((constant_text("a", 1, 101, 100), constant_text("b", 2, 102, 100)))
    windows = held_out_windows(two, num_sequences=10, context_tokens=8)
    assert Counter(windows[:, 0].tolist()) == {101: 5, 102: 5}
    assert all(len(set(window.tolist())) == 1 for window in windows)


@pytest.mark.parametrize("name", ["commons", "demo"])
def test_the_shipped_runs_evaluate_on_every_text(name: str) -> None:
    spec = load_builtin_run(name)
    corpus = load_corpus(spec.data)
    windows = held_out_windows(
        corpus,
        num_sequences=spec.evaluation.num_sequences,
        context_tokens=spec.model.context_tokens,
    )
    counts = [sum(w.tobytes() in text.held_out.tobytes() for w in windows) for text in corpus.texts]
    assert sum(counts) >= spec.evaluation.num_sequences  # both Shakespeares share some lines
    assert all(count > 0 for count in counts)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(RunSpecError, match="builtin:bible is unknown") as caught:
        load_corpus(DataSpec(sources=("builtin:bible",)))
    for name in ("shakespeare", "folio", "milton"):
        assert f"builtin:{name}" in str(caught.value)


@pytest.mark.parametrize("name", ["", "../run", "milton.txt", "commons"])
def test_names_reach_nothing_but_texts(name: str) -> None:
    with pytest.raises(RunSpecError, match="known:"):
        read_builtin_text(name)


def test_a_text_shorter_than_a_window_is_refused() -> None:
    corpus = counting_corpus(8)
    with pytest.raises(RunSpecError, match="no training text has 9 tokens"):
        read(corpus)
    with pytest.raises(RunSpecError, match="no held-out text has 9 tokens"):
        held_out_windows(corpus, num_sequences=1, context_tokens=8)


def test_the_texts_are_those_that_provenance_describes() -> None:
    file = Path(__file__).parents[3] / "volunteer" / "data" / "PROVENANCE.md"
    stated = dict(re.findall(r"^\| (\w+) \| `([0-9a-f]{64})` \|$", file.read_text(), re.MULTILINE))
    actual = {n: blake3(read_builtin_text(n).tobytes()).hexdigest() for n in builtin_names()}
    assert stated == actual
