"""The held-out loss: a number that depends on the weights alone."""

from __future__ import annotations

import math

import pytest
import torch

from tests.volunteer.training.tiny_run import tiny_spec, tiny_weights_P
from volunteer.errors import TrainerError
from volunteer.training import evaluation
from volunteer.training.data import held_out_windows, load_corpus
from volunteer.training.evaluation import held_out_loss
from volunteer.training.model import forward, weights_of

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
