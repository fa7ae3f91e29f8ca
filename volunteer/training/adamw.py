"""AdamW on flat vectors.

Runs in: trainer. Stage 1 of a round.

Paper: arXiv:1711.05101. A step goes through the vectors in slices that stay in the processor's
cache, since its eight passes would each read them from memory; bit for bit it is the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from volunteer.run import InnerSpec, ModelSpec
from volunteer.training.layout import model_layout

ADAM_EPSILON = 1e-8
"""Added to the root of the second moment; the value of the Adam paper and of torch."""
SLICE_ELEMENTS = {"cpu": 2**18}
"""By kind of device: 1 MiB of each of five vectors. 25 M parameters take 36 ms so, 88 ms whole."""
_SLICE_ELEMENTS_ELSEWHERE = 2**25


@dataclass(slots=True)
class AdamState:
    """Both moments, changed in place by a step; shape (P,), as the weights are."""

    mean_P: Tensor
    square_P: Tensor

    @classmethod
    def zeros_like(cls, weights_P: Tensor) -> AdamState:
        """Return the state before the first step."""
        return cls(torch.zeros_like(weights_P), torch.zeros_like(weights_P))


def decay_ranges(model: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return the (start, end) ranges of the flat vector that decay: matrices, but not norms."""
    ranges: list[tuple[int, int]] = []
    for slot in model_layout(model):
        if slot.is_norm:
            continue
        if ranges and ranges[-1][1] == slot.offset:
            ranges[-1] = (ranges[-1][0], slot.end)
        else:
            ranges.append((slot.offset, slot.end))
    return tuple(ranges)


def adamw_step(
    weights_P: Tensor,
    gradient_P: Tensor,
    adam: AdamState,
    inner: InnerSpec,
    *,
    lr: float,
    num_steps: int,
    ranges: tuple[tuple[int, int], ...],
    scratch_P: Tensor | None = None,
) -> None:
    """Take one AdamW step in place.

    Paper: arXiv:1711.05101, Alg. 2 (decay decoupled from the moments, scaled by the learning rate
    as torch.optim.AdamW does).

    Args:
        weights_P: changed.
        gradient_P: read.
        adam: changed.
        inner: betas and weight decay.
        lr: of this step.
        num_steps: counting this one, for the bias correction; at least 1.
        ranges: (start, end) of the elements that decay, as `decay_ranges` has them.
        scratch_P: of any content, at least as long as a slice or the weights; None: one is made.

    Cost: one temporary slice; it is there before anything is changed, so that running out of memory
    leaves weights and moments as they were.
    """
    num = len(weights_P)
    scratch_S = new_scratch(weights_P) if scratch_P is None else scratch_P
    slice_elements = _slice_elements(weights_P)
    for start in range(0, num, slice_elements):
        stop = min(start + slice_elements, num)
        for begin, end in ranges:
            if begin < stop and end > start:
                weights_P[max(begin, start) : min(end, stop)].mul_(1.0 - lr * inner.weight_decay)
        gradient_S, mean_S, square_S = (
            vector_P[start:stop] for vector_P in (gradient_P, adam.mean_P, adam.square_P)
        )
        root_S = scratch_S[: stop - start]
        mean_S.mul_(inner.beta1).add_(gradient_S, alpha=1.0 - inner.beta1)
        square_S.mul_(inner.beta2).addcmul_(gradient_S, gradient_S, value=1.0 - inner.beta2)
        torch.div(square_S, 1.0 - inner.beta2**num_steps, out=root_S)
        root_S.sqrt_().add_(ADAM_EPSILON)
        step_size = lr / (1.0 - inner.beta1**num_steps)
        weights_P[start:stop].addcdiv_(mean_S, root_S, value=-step_size)


def new_scratch(weights_P: Tensor) -> Tensor:
    """Return what a step needs beside its vectors: one slice."""
    return weights_P.new_empty(_slice_elements(weights_P))


def _slice_elements(weights_P: Tensor) -> int:
    most = SLICE_ELEMENTS.get(weights_P.device.type, _SLICE_ELEMENTS_ELSEWHERE)
    return min(len(weights_P), most)
