"""The model: a decoder over byte-level tokens whose parameters are one flat vector.

Runs in: trainer (training), aggregator (held-out loss). Stage 1 of a round.

All parameters lie in one vector (layout.py); a layer's matrices are views of it. So the
pseudo-gradient is one subtraction, a snapshot one copy, and nothing is ever packed or unpacked.
Functions are generic over the floating dtype: fp32 in use, fp64 in tests.

RMSNorm: arXiv:1910.07467. RoPE: arXiv:2104.09864 (pairs are i and i + head_dim / 2, as in
published Llama weights). SwiGLU: arXiv:2002.05202. Keys and values may have fewer heads than
queries (grouped-query attention: arXiv:2305.13245). The output projection is tied to the embedding
unless the model says otherwise.

A decoder layer is a function of tensors alone, so that it can be compiled once for all layers, or
its activations computed again in the backward pass (acceleration.py).

Shape legend: B batch, T tokens, D model width, N heads (of queries), K heads of keys and values,
H head width, F SwiGLU width, V vocabulary, P all parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from volunteer.run import ModelSpec
from volunteer.training.layout import LAYER_NAMES, model_layout, num_parameters

NORM_EPSILON = 1e-5
"""Added to the mean square in RMSNorm; Llama's value."""

Weights = Mapping[str, Tensor]
"""Every parameter of the layout by name, in its shape."""


def weights_of(weights_P: Tensor, model: ModelSpec) -> dict[str, Tensor]:
    """Return the named parameters as views of a flat vector.

    Args:
        weights_P: shape (P,), any floating dtype, any device. Not copied.
        model: the shape.

    Raises:
        ValueError: the vector does not have the model's number of parameters.
    """
    if weights_P.shape != (num_parameters(model),):
        raise ValueError(
            f"{tuple(weights_P.shape)} is not the shape of {num_parameters(model)} parameters"
        )
    return {
        slot.name: weights_P.narrow(0, slot.offset, slot.num_elements).view(slot.shape)
        for slot in model_layout(model)
    }


class TrainableWeights:
    """Flat weights whose gradient is a flat vector too.

    Each named parameter is an autograd leaf over a view of `weights_P`, and its `.grad` a view of
    `gradient_P`, into which backward passes add in place.

    Cost: one more vector of P elements on the device of `weights_P`.
    """

    def __init__(self, weights_P: Tensor, model: ModelSpec) -> None:
        """Take over `weights_P` (shape (P,)); optimizer steps change it in place."""
        self.weights_P = weights_P
        self.gradient_P = torch.zeros_like(weights_P)
        gradients = weights_of(self.gradient_P, model)
        self.parameters: dict[str, Tensor] = {}
        for name, view in weights_of(weights_P, model).items():
            leaf = view.detach().requires_grad_()
            leaf.grad = gradients[name]
            self.parameters[name] = leaf


class LayerWeights(NamedTuple):
    """The parameters of one decoder layer, as the layout names them."""

    attention_norm_D: Tensor
    wq_DD: Tensor
    wk_KHD: Tensor
    """Shape (K * H, D), as `wv_KHD`."""
    wv_KHD: Tensor
    wo_DD: Tensor
    ffn_norm_D: Tensor
    w1_FD: Tensor
    w3_FD: Tensor
    w2_DF: Tensor


class RopeTables(NamedTuple):
    """Cosines and sines of each position's angles."""

    cos_TH: Tensor
    sin_TH: Tensor


RunLayer = Callable[[Tensor, LayerWeights, RopeTables, int], Tensor]
"""`decoder_layer`, or what computes the same in another way."""
LossFunction = Callable[[Weights, Tensor, ModelSpec], Tensor]
"""`next_token_loss`, or what computes the same in another way."""


def forward(
    weights: Weights, tokens_BT: Tensor, model: ModelSpec, run_layer: RunLayer | None = None
) -> Tensor:
    """Return the logits of the next token at every position.

    Args:
        weights: the named parameters, on one device.
        tokens_BT: int64, on the same device, T at most `context_tokens`.
        model: the shape.
        run_layer: what computes a layer; None: `decoder_layer`.

    Returns:
        logits_BTV, of the weights' dtype (bfloat16 under autocast).
    """
    run_layer = run_layer or decoder_layer
    x_BTD = F.embedding(tokens_BT, weights["embedding"])
    tables = rope_tables(
        tokens_BT.shape[1], model.head_dim, model.rope_base, x_BTD.dtype, x_BTD.device
    )
    for i in range(model.num_layers):
        x_BTD = run_layer(x_BTD, layer_weights(weights, i), tables, model.head_dim)
    return read_out(weights, x_BTD)


def next_token_loss(
    weights: Weights, windows_BT1: Tensor, model: ModelSpec, run_layer: RunLayer | None = None
) -> Tensor:
    """Return the mean cross-entropy of the tokens after the first, in nats per token.

    Args:
        weights: the named parameters.
        windows_BT1: int64, shape (B, T + 1): all but the last are inputs, all
            but the first targets.
        model: the shape.
        run_layer: what computes a layer; None: `decoder_layer`.

    Returns:
        Scalar, of the weights' dtype (fp32 under autocast).
    """
    logits_BTV = forward(weights, windows_BT1[:, :-1], model, run_layer)
    return F.cross_entropy(logits_BTV.flatten(0, 1), windows_BT1[:, 1:].flatten())


def layer_weights(weights: Weights, index: int) -> LayerWeights:
    """Return the parameters of a layer."""
    return LayerWeights(*(weights[f"layers.{index}.{name}"] for name in LAYER_NAMES))


def decoder_layer(x_BTD: Tensor, layer: LayerWeights, tables: RopeTables, head_dim: int) -> Tensor:
    """Return what follows x in the residual stream: attention, then SwiGLU."""
    q_BNTH, k_BKTH, v_BKTH = project_heads(x_BTD, layer, tables, head_dim)
    mixed_BNTH = attend(q_BNTH, k_BKTH, v_BKTH, is_causal=True)
    return leave_layer(x_BTD, mixed_BNTH, layer)


def project_heads(
    x_BTD: Tensor, layer: LayerWeights, tables: RopeTables, head_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, turned to their positions, and values."""
    normed_BTD = rms_norm(x_BTD, layer.attention_norm_D)
    q_BNTH, k_BKTH, v_BKTH = (
        split_heads(F.linear(normed_BTD, matrix), head_dim)
        for matrix in (layer.wq_DD, layer.wk_KHD, layer.wv_KHD)
    )
    return rotate(q_BNTH, tables), rotate(k_BKTH, tables), v_BKTH


def attend(q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, *, is_causal: bool) -> Tensor:
    """Return mixed_BNTH; head n of the queries reads head n * K // N of keys and values."""
    if q_BNTH.shape[1] == k_BKTH.shape[1]:
        return F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=is_causal)
    return F.scaled_dot_product_attention(
        q_BNTH, k_BKTH, v_BKTH, is_causal=is_causal, enable_gqa=True
    )


def leave_layer(x_BTD: Tensor, mixed_BNTH: Tensor, layer: LayerWeights) -> Tensor:
    """Add what the heads have read to x, then SwiGLU of that: w2(silu(w1 x) * w3 x)."""
    x_BTD = x_BTD + F.linear(mixed_BNTH.transpose(1, 2).flatten(2), layer.wo_DD)
    normed_BTD = rms_norm(x_BTD, layer.ffn_norm_D)
    gate_BTF = F.silu(F.linear(normed_BTD, layer.w1_FD))
    return x_BTD + F.linear(gate_BTF * F.linear(normed_BTD, layer.w3_FD), layer.w2_DF)


def read_out(weights: Weights, x_BTD: Tensor) -> Tensor:
    """Return logits of what stands in the residual stream after the last layer."""
    normed_BTD = rms_norm(x_BTD, weights["final_norm"])
    return F.linear(normed_BTD, weights.get("output", weights["embedding"]))


def rms_norm(x_BTD: Tensor, scale_D: Tensor) -> Tensor:
    """Return x over its root mean square, times the gain; shape as x (arXiv:1910.07467)."""
    return F.rms_norm(x_BTD, scale_D.shape, scale_D, NORM_EPSILON)


def split_heads(x_BTD: Tensor, head_dim: int) -> Tensor:
    """Return x as (B, heads, T, head_dim); D may be less than the model's, as keys have it."""
    return x_BTD.view(*x_BTD.shape[:2], -1, head_dim).transpose(1, 2)


def rotate(x_BNTH: Tensor, tables: RopeTables) -> Tensor:
    """Return x with each pair of halves turned by its position's angle (RoPE, arXiv:2104.09864)."""
    first, second = x_BNTH.chunk(2, dim=-1)
    # The tables are of the weights' dtype; under autocast x is narrower and stays so.
    rotated = x_BNTH * tables.cos_TH + torch.cat((-second, first), dim=-1) * tables.sin_TH
    return rotated.to(x_BNTH.dtype)


@functools.lru_cache(maxsize=8)
def rope_tables(
    num_tokens: int, head_dim: int, base: float, dtype: torch.dtype, device: torch.device
) -> RopeTables:
    """Return cos and sin of position times frequency, shape (T, H), computed in fp64 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(num_tokens, dtype=torch.float64), base**-exponents)
    angles_TH = torch.cat((angles, angles), dim=-1)
    return RopeTables(angles_TH.cos().to(device, dtype), angles_TH.sin().to(device, dtype))
