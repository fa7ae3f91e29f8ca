"""The held-out loss: a number that depends on the weights alone."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from p2p.blobstore import BlobStore
from tests.volunteer.training.tiny_run import tiny_spec, tiny_weights_P
from volunteer.errors import TrainerError
from volunteer.messages import EvaluateState, StateEvaluated
from volunteer.training import evaluation
from volunteer.training.aggregator import Aggregator
from volunteer.training.data import Corpus, held_out_windows, load_corpus
from volunteer.training.evaluation import evaluate, held_out_loss, spread_order
from volunteer.training.genesis import genesis_slices
from volunteer.training.layout import num_parameters
from volunteer.training.model import forward, next_token_loss, weights_of
from volunteer.training.state import write_state_slices

SPEC = tiny_spec()


def test_the_loss_is_the_mean_over_every_held_out_token() -> None:
    weights_P = tiny_weights_P(SPEC) * 5
    windows = held_out_windows(
        load_corpus(SPEC.data),
        num_sequences=SPEC.evaluation.num_sequences,
        context_tokens=SPEC.model.context_tokens,
    )
    losses = []
    for window in torch.from_numpy(windows).long():
        logits_TV = forward(weights_of(weights_P, SPEC.model), window[None, :-1], SPEC.model)[0]
        log_probabilities = logits_TV.double().log_softmax(-1)
        losses += [-float(log_probabilities[t, token]) for t, token in enumerate(window[1:])]
    assert held_out_loss(SPEC, weights_P) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_batch_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weights_P = tiny_weights_P(SPEC)
    whole = held_out_loss(SPEC, weights_P)
    monkeypatch.setattr(evaluation, "BATCH_SEQUENCES", 5)
    assert held_out_loss(SPEC, weights_P) == pytest.approx(whole, rel=1e-6)


def test_broken_weights_are_told_and_not_averaged() -> None:
    weights_P = tiny_weights_P(SPEC)
    weights_P[3] = math.nan
    with pytest.raises(TrainerError, match="broken"):
        held_out_loss(SPEC, weights_P)


def test_a_machine_without_time_measures_a_beginning_that_is_spread_over_all() -> None:
    weights_P, corpus = tiny_weights_P(SPEC) * 5, load_corpus(SPEC.data)
    whole = evaluate(SPEC, weights_P, corpus)
    assert whole.num_windows == SPEC.evaluation.num_sequences == 64
    part = evaluate(SPEC, weights_P, corpus, should_stop=lambda: True)
    assert part.num_windows == evaluation.BATCH_SEQUENCES
    assert part.nats_per_byte != whole.nats_per_byte
    assert abs(part.nats_per_byte - whole.nats_per_byte) < 4 * part.stderr
    assert 1.4 < part.stderr / whole.stderr < 2.8  # a quarter of the windows, drawn otherwise


def test_the_bytes_of_a_token_are_measured_with_the_loss() -> None:
    weights_P, corpus = tiny_weights_P(SPEC), load_corpus(SPEC.data)
    assert evaluate(SPEC, weights_P, corpus).bytes_per_token == 1.0
    wordy = [
        dataclasses.replace(text, held_out_bytes=np.full(len(text.held_out), 4, dtype=np.uint16))
        for text in corpus.texts
    ]
    found = evaluate(SPEC, weights_P, Corpus(tuple(wordy)))
    assert found.bytes_per_token == 4.0
    assert found.nats_per_byte * 4.0 == pytest.approx(held_out_loss(SPEC, weights_P))


@pytest.mark.parametrize("num", [1, 2, 5, 64, 100])
def test_every_beginning_of_the_order_is_spread(num: int) -> None:
    order = spread_order(num)
    assert sorted(order) == list(range(num))
    for count in range(2, num + 1):
        gaps = [b - a for a, b in itertools.pairwise(sorted(order[:count]))]
        assert max(gaps) <= 4 * num / count


def test_the_standard_error_is_that_of_a_mean_where_windows_cover_alike() -> None:
    weights_P, corpus = tiny_weights_P(SPEC) * 5, load_corpus(SPEC.data)
    windows = held_out_windows(corpus, num_sequences=64, context_tokens=16)
    means = []
    for window_T1 in torch.from_numpy(windows).long():
        loss = next_token_loss(weights_of(weights_P, SPEC.model), window_T1[None], SPEC.model)
        means.append(float(loss))
    due = statistics.stdev(means) / math.sqrt(64)
    assert evaluate(SPEC, weights_P, corpus).stderr == pytest.approx(due, rel=1e-4)


def test_an_aggregator_of_whom_something_else_is_asked_measures_one_batch(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    state_hash = write_state_slices(genesis_slices(SPEC), num_parameters(SPEC.model), store)
    command = EvaluateState(request_id=3, state_hash=state_hash)
    found = []
    for is_awaited in (True, False):
        aggregator = Aggregator(SPEC, "dense", store, is_awaited=lambda is_it=is_awaited: is_it)  # type: ignore[misc]  # bound now
        event = aggregator.answer(command)
        assert isinstance(event, StateEvaluated)
        found.append(event)
    assert [event.num_windows for event in found] == [evaluation.BATCH_SEQUENCES, 64]
    assert found[1].held_out_loss == held_out_loss(SPEC, tiny_weights_P(SPEC))
    assert found[0].loss_stderr > found[1].loss_stderr > 0.0
