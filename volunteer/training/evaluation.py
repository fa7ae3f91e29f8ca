"""The held-out loss of a shared state: the one number that says whether a run gets better.

Runs in: aggregator. The windows are the same for every member and every time, in an order of which
every beginning is spread evenly over all held-out text: a machine that has no time for all of them
measures fewer, and says how many and how uncertain that makes it.

It is told in nats per byte of text, so that runs with different tokenizers can be compared: the
nats of all targets, divided by the bytes that they cover.

Shape legend: B windows, T1 = context_tokens + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from volunteer.errors import TrainerError
from volunteer.run import ModelSpec, RunSpec
from volunteer.training.data import (
    Corpus,
    held_out_window_bytes,
    held_out_windows,
    load_corpus,
)
from volunteer.training.model import Weights, forward, weights_of

BATCH_SEQUENCES = 16
"""Small, since the aggregator shares the machine with training, and looks whether something else is
asked of it after each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What was measured."""

    nats_per_byte: float
    stderr: float
    """Standard error of it over the windows; 0 with a single one."""
    num_windows: int
    bytes_per_token: float
    """Bytes of text that a target covers."""


def held_out_loss(spec: RunSpec, weights_P: Tensor) -> float:
    """Return the loss over all held-out windows of a run on the package's texts, nats per byte.

    Args:
        spec: says which windows.
        weights_P: shared weights, fp32, shape (P,), on the CPU.

    Raises:
        RunSpecError: the data is unknown, or has no held-out window.
        TrainerError: the loss is not finite: the weights are broken.
    """
    return evaluate(spec, weights_P, load_corpus(spec.data, only_public=True)).nats_per_byte


def evaluate_run(
    spec: RunSpec, weights_P: Tensor, run_dir: Path | None, *, should_stop: Callable[[], bool]
) -> Evaluation:
    """Measure a state on what the run's folder holds of its held-out text; see `evaluate`.

    Raises:
        DataUnavailableError: some of it has not been prepared yet.
        RunSpecError: as `evaluate`.
        TrainerError: as `evaluate`.
    """
    corpus = load_corpus(spec.data, run_dir, only_public=True)
    return evaluate(spec, weights_P, corpus, should_stop=should_stop)


def evaluate(
    spec: RunSpec,
    weights_P: Tensor,
    corpus: Corpus,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Measure a state on the held-out windows, or on as many as there is time for.

    Args:
        spec: says which windows.
        weights_P: shared weights, fp32, shape (P,), on the CPU.
        corpus: the public texts.
        should_stop: asked after each batch.

    Raises:
        RunSpecError: the data has no held-out window.
        TrainerError: the loss is not finite: the weights are broken.
    """
    num, context = spec.evaluation.num_sequences, spec.model.context_tokens
    windows = held_out_windows(corpus, num_sequences=num, context_tokens=context)
    lengths = held_out_window_bytes(corpus, num_sequences=num, context_tokens=context)
    order = spread_order(num)
    windows_BT1 = torch.from_numpy(windows[order]).long()
    weights = weights_of(weights_P, spec.model)
    nats: list[float] = []
    with torch.no_grad():
        for batch_BT1 in torch.split(windows_BT1, BATCH_SEQUENCES):
            nats += nats_of_windows(weights, batch_BT1, spec.model)
            if should_stop():
                break
    return _estimate(nats, [int(length) for length in lengths[order][: len(nats)]], context)


def spread_order(num: int) -> list[int]:
    """Return 0..num-1 in an order whose every beginning is spread over all: bits in reverse."""
    num_bits = max(1, (num - 1).bit_length())
    return sorted(range(num), key=lambda i: f"{i:0{num_bits}b}"[::-1])


def nats_of_windows(weights: Weights, batch_BT1: Tensor, model: ModelSpec) -> list[float]:
    """Return the sum over each window's targets."""
    logits_BTV = forward(weights, batch_BT1[:, :-1], model)
    nats_BT = F.cross_entropy(logits_BTV.transpose(1, 2), batch_BT1[:, 1:], reduction="none")
    return [float(window) for window in nats_BT.double().sum(dim=1)]


def _estimate(nats: list[float], lengths: list[int], context_tokens: int) -> Evaluation:
    num, num_bytes = len(nats), max(1, sum(lengths))
    mean = math.fsum(nats) / num_bytes
    if not math.isfinite(mean):
        raise TrainerError(f"the held-out loss is {mean}: these weights are broken")
    # Of a ratio of sums: how far each window is from what the ratio says of it.
    squares = math.fsum((n - mean * b) ** 2 for n, b in zip(nats, lengths, strict=True))
    stderr = math.sqrt(squares * num / (num - 1)) / num_bytes if num > 1 else 0.0
    return Evaluation(
        nats_per_byte=mean,
        stderr=stderr,
        num_windows=num,
        bytes_per_token=num_bytes / (num * context_tokens),
    )
