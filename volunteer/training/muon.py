"""Muon: momentum whose directions are made orthogonal, for the matrices of the hidden layers.

Runs in: trainer. Stage 1 of a round, where the run's `inner.optimizer` is `muon`.

    m <- mu m + (1 - mu) g;  u = (1 - mu) g + mu m               (Nesterov's look ahead)
    O = NewtonSchulz(u), about U V^T of u = U S V^T
    W <- W - lr (0.2 sqrt(max(A, B)) O + weight_decay W)         for W of shape (A, B)

Papers: Muon: kellerjordan.github.io/posts/muon (iteration, coefficients, which parameters). The
factor 0.2 sqrt(max(A, B)) gives the update the root mean square that AdamW's usually has, so that
the learning rate and weight decay of AdamW carry over: arXiv:2502.16982 (Moonlight; it is
`match_rms_adamw` in torch.optim.Muon). As inner optimizer of DiLoCo: arXiv:2505.23725 (MuLoCo).

Embedding, output and the gains of norms take AdamW steps with the same learning rate. All vectors
are those of AdamW: m lies in `mean_P` where a matrix of a hidden layer does, and `square_P` is not
used there and stays 0. So a snapshot has one form, whichever optimizer a run has.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from volunteer.run import InnerSpec, ModelSpec
from volunteer.training.adamw import AdamState, adamw_step
from volunteer.training.layout import ParameterSlot, model_layout

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: five rounds take singular values of 0.01 to 1 to between 0.7 and 1.2 or so."""
_ADAMW_RMS = 0.2
_LEAST_NORM = 1e-7


def is_orthogonalised(slot: ParameterSlot) -> bool:
    """Tell whether Muon steps a parameter: a matrix of a hidden layer."""
    return slot.name.startswith("layers.") and not slot.is_norm


def muon_step(
    weights_P: Tensor,
    gradient_P: Tensor,
    adam: AdamState,
    inner: InnerSpec,
    model: ModelSpec,
    *,
    lr: float,
    num_steps: int,
    product_dtype: torch.dtype,
) -> None:
    """Take one step in place.

    Args:
        weights_P: changed.
        gradient_P: read.
        adam: changed.
        inner: momentum, betas of AdamW, and weight decay.
        model: the shape.
        lr: of this step.
        num_steps: counting this one, for AdamW's bias correction; at least 1.
        product_dtype: of the iteration's matrix products; bfloat16 suffices, and is fast on a GPU.

    Cost: one temporary vector of P elements, and four matrices of the size of the largest. All of
    it is there before anything is changed, so that running out of memory changes nothing.
    """
    slots = model_layout(model)
    update_P = torch.empty_like(weights_P)
    mu = inner.muon_momentum
    for slot in filter(is_orthogonalised, slots):
        # (1 - mu) g + mu m, with m as it will be.
        ahead_AB = gradient_P[slot.offset : slot.end] * (1.0 - mu * mu)
        ahead_AB.add_(adam.mean_P[slot.offset : slot.end], alpha=mu * mu)
        update_AB = orthogonalise(ahead_AB.view(slot.shape), product_dtype)
        update_P[slot.offset : slot.end] = update_AB.flatten()
    for slot in slots:
        part = slice(slot.offset, slot.end)
        if is_orthogonalised(slot):
            adam.mean_P[part].lerp_(gradient_P[part], 1.0 - mu)
            weights_P[part].mul_(1.0 - lr * inner.weight_decay)
            scale = _ADAMW_RMS * math.sqrt(max(slot.shape))
            weights_P[part].add_(update_P[part], alpha=-lr * scale)
        else:
            adamw_step(
                weights_P[part],
                gradient_P[part],
                AdamState(adam.mean_P[part], adam.square_P[part]),
                inner,
                lr=lr,
                num_steps=num_steps,
                ranges=() if slot.is_norm else ((0, slot.num_elements),),
                scratch_P=update_P[part],
            )


def orthogonalise(matrix_AB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix with the same singular vectors whose singular values are all about 1.

    Args:
        matrix_AB: any floating dtype; not changed.
        dtype: of the products, and of what is returned.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix_AB.shape[0] > matrix_AB.shape[1]
    x = matrix_AB.to(dtype)
    x = x.T if is_tall else x
    # No singular value is greater than the norm.
    x = x / x.norm().clamp(min=_LEAST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def new_muon_scratch(weights_P: Tensor, model: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return what a step needs beside its vectors: all updates, and the iteration's matrices."""
    largest = max(slot.num_elements for slot in filter(is_orthogonalised, model_layout(model)))
    return torch.empty_like(weights_P), weights_P.new_empty(4 * largest)
