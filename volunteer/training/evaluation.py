"""The held-out loss of a shared state: the one number that says whether a run gets better.

Runs in: aggregator. The windows are the same for every member and every time.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from volunteer.errors import TrainerError
from volunteer.run import RunSpec
from volunteer.training.data import held_out_windows, load_corpus
from volunteer.training.model import next_token_loss, weights_of

BATCH_SEQUENCES = 16
"""Small, since the aggregator shares the machine with training; the loss does not depend on it."""


def held_out_loss(spec: RunSpec, weights_P: Tensor) -> float:
    """Return the mean loss over the fixed held-out windows, nats per token.

    Args:
        spec: says which windows.
        weights_P: shared weights, fp32, shape (P,), on the CPU.

    Raises:
        RunSpecError: the data is unknown, or has no held-out window.
        TrainerError: the loss is not finite: the weights are broken.
    """
    windows = held_out_windows(
        load_corpus(spec.data),
        num_sequences=spec.evaluation.num_sequences,
        context_tokens=spec.model.context_tokens,
    )
    windows_BT1 = torch.from_numpy(windows).long()
    weights = weights_of(weights_P, spec.model)
    losses = []
    with torch.no_grad():
        for batch_BT1 in torch.split(windows_BT1, BATCH_SEQUENCES):
            loss = next_token_loss(weights, batch_BT1, spec.model)
            losses.append(float(loss) * len(batch_BT1))
    mean = math.fsum(losses) / len(windows_BT1)
    if not math.isfinite(mean):
        raise TrainerError(f"the held-out loss is {mean}: these weights are broken")
    return mean
