"""The inner step: a gradient, in micro-batches, and a step of the run's optimizer, or neither.

Runs in: trainer. Stage 1 of a round.

Paper: arXiv:2311.08105, Alg. 1: the inner optimizer of each worker is AdamW (adamw.py), or Muon
(muon.py) as in arXiv:2505.23725; its state stays with the worker across rounds and is never
communicated.

Shape legend: B sequences of a step, T1 = context_tokens + 1, P all parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from volunteer.errors import TrainerError
from volunteer.run import InnerSpec, ModelSpec
from volunteer.training.adamw import AdamState, adamw_step, decay_ranges, new_scratch
from volunteer.training.devices import Device
from volunteer.training.model import LossFunction, TrainableWeights, next_token_loss
from volunteer.training.muon import muon_step, new_muon_scratch


class NotFiniteError(TrainerError):
    """The loss, the gradient or the weights are not finite numbers any more."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one inner step saw."""

    loss: float
    """Mean over the batch before the step, nats per token."""
    gradient_norm: float
    """Before clipping."""


def learning_rate(inner: InnerSpec, *, inner_step: int, round_index: int) -> float:
    """Return the learning rate of an inner step.

    Linear warm-up over local steps, times a cosine over rounds from 1 to `floor_fraction`: rounds
    are shared, so all members cool down together, however fast they are.

    Args:
        inner: the hyperparameters.
        inner_step: local steps taken before this one.
        round_index: height of the commit that is trained on.
    """
    warmup = min(1.0, (inner_step + 1) / max(1, inner.warmup_steps))
    elapsed = min(1.0, round_index / inner.decay_rounds)
    cosine = 0.5 * (1.0 + math.cos(math.pi * elapsed))
    return inner.lr * warmup * (inner.floor_fraction + (1.0 - inner.floor_fraction) * cosine)


def accumulate_gradient(
    weights: TrainableWeights,
    windows_BT1: Tensor,
    model: ModelSpec,
    *,
    micro_batch_sequences: int,
    device: Device,
    should_stop: Callable[[], bool],
    loss_function: LossFunction = next_token_loss,
) -> float | None:
    """Set `weights.gradient_P` to the gradient of the mean loss over the batch.

    Args:
        weights: only `gradient_P` is changed.
        windows_BT1: int64, shape (B, T1), on the weights' device.
        model: the shape.
        micro_batch_sequences: sequences per backward pass, at least 1.
        device: for the precision of the forward passes.
        should_stop: asked before each micro-batch.
        loss_function: of a micro-batch.

    Returns:
        The mean loss, nats per token; None if told to stop, with the gradient then unfinished.
    """
    weights.gradient_P.zero_()
    loss_sum = torch.zeros((), dtype=torch.float64, device="cpu")
    for micro_BT1 in torch.split(windows_BT1, micro_batch_sequences):
        if should_stop():
            return None
        with device.autocast():
            loss = loss_function(weights.parameters, micro_BT1, model)
        share = len(micro_BT1) / len(windows_BT1)
        (loss * share).backward()  # type: ignore[no-untyped-call]
        # Waits for the device, so that a stop is seen within one micro-batch of real time.
        loss_sum += loss.detach().cpu().double() * share
    return float(loss_sum)


def clip_gradient(gradient_P: Tensor, clip_norm: float) -> float:
    """Scale the gradient in place to at most `clip_norm`.

    Returns:
        Its Euclidean norm before.

    Raises:
        NotFiniteError: the norm is infinite or not a number; nothing was changed.
    """
    norm = float(torch.linalg.vector_norm(gradient_P))
    if not math.isfinite(norm):
        raise NotFiniteError(f"gradient norm is {norm}")
    if norm > clip_norm:
        gradient_P.mul_(clip_norm / norm)
    return norm


def take_inner_step(
    weights: TrainableWeights,
    adam: AdamState,
    windows_BT1: Tensor,
    model: ModelSpec,
    inner: InnerSpec,
    *,
    inner_step: int,
    round_index: int,
    micro_batch_sequences: int,
    device: Device,
    should_stop: Callable[[], bool],
    loss_function: LossFunction = next_token_loss,
) -> StepResult | None:
    """Take one inner step, or none at all.

    Args:
        weights: changed in place.
        adam: changed in place.
        windows_BT1: int64, shape (B, T1), on the weights' device.
        model: the shape.
        inner: the hyperparameters.
        inner_step: local steps taken before this one.
        round_index: height of the commit that is trained on.
        micro_batch_sequences: sequences per backward pass.
        device: for the precision of the forward passes.
        should_stop: asked before each micro-batch.
        loss_function: of a micro-batch.

    Returns:
        None if told to stop: weights and moments are then as before.

    Raises:
        NotFiniteError: loss or gradient is not finite; weights and moments are as before.
    """
    loss = accumulate_gradient(
        weights,
        windows_BT1,
        model,
        micro_batch_sequences=micro_batch_sequences,
        device=device,
        should_stop=should_stop,
        loss_function=loss_function,
    )
    if loss is None:
        return None
    if not math.isfinite(loss):
        raise NotFiniteError(f"loss is {loss}")
    norm = clip_gradient(weights.gradient_P, inner.clip_norm)
    _take_optimizer_step(
        weights,
        adam,
        model,
        inner,
        lr=learning_rate(inner, inner_step=inner_step, round_index=round_index),
        num_steps=inner_step + 1,
        product_dtype=device.autocast_dtype or weights.weights_P.dtype,
    )
    return StepResult(loss=loss, gradient_norm=norm)


def _take_optimizer_step(
    weights: TrainableWeights,
    adam: AdamState,
    model: ModelSpec,
    inner: InnerSpec,
    *,
    lr: float,
    num_steps: int,
    product_dtype: torch.dtype,
) -> None:
    weights_P, gradient_P = weights.weights_P, weights.gradient_P
    if inner.optimizer == "muon":
        muon_step(
            weights_P,
            gradient_P,
            adam,
            inner,
            model,
            lr=lr,
            num_steps=num_steps,
            product_dtype=product_dtype,
        )
    else:
        ranges = decay_ranges(model)
        adamw_step(weights_P, gradient_P, adam, inner, lr=lr, num_steps=num_steps, ranges=ranges)


def allocate_scratch(weights_P: Tensor, model: ModelSpec, inner: InnerSpec) -> None:
    """Take what a step of the optimizer takes beside the gradient, and let it go again."""
    if inner.optimizer == "muon":
        new_muon_scratch(weights_P, model)
    else:
        new_scratch(weights_P)
