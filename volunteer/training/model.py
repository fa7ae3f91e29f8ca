"""The model: a decoder over byte-level tokens whose parameters are one flat vector.

Runs in: trainer (training), aggregator (held-out loss). Stage 1 of a round.

All parameters lie in one vector (layout.py); a layer's matrices are views of it. So the
pseudo-gradient is one subtraction, a snapshot one copy, and nothing is ever packed or unpacked.
Functions are generic over the floating dtype: fp32 in use, fp64 in tests.

RMSNorm: arXiv:1910.07467. RoPE: arXiv:2104.09864 (pairs are i and i + head_dim / 2, as in
published Llama weights). SwiGLU: arXiv:2002.05202. Output projection tied to the embedding.

Shape legend: B batch, T tokens, D model width, N heads, H head width, F SwiGLU width,
V vocabulary, P all parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from volunteer.run import ModelSpec
from volunteer.training.layout import model_layout, num_parameters

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


def forward(weights: Weights, tokens_BT: Tensor, model: ModelSpec) -> Tensor:
    """Return the logits of the next token at every position.

    Args:
        weights: the named parameters, on one device.
        tokens_BT: int64, on the same device, T at most `context_tokens`.
        model: the shape.

    Returns:
        logits_BTV, of the weights' dtype (bfloat16 under autocast).
    """
    x_BTD = F.embedding(tokens_BT, weights["embedding"])
    cos_TH, sin_TH = rope_tables(
        tokens_BT.shape[1],
        model.dim // model.num_heads,
        model.rope_base,
        x_BTD.dtype,
        x_BTD.device,
    )
    for i in range(model.num_layers):
        layer = f"layers.{i}."
        normed_BTD = rms_norm(x_BTD, weights[layer + "attention_norm"])
        x_BTD = x_BTD + _attention(weights, layer, normed_BTD, cos_TH, sin_TH, model.num_heads)
        normed_BTD = rms_norm(x_BTD, weights[layer + "ffn_norm"])
        x_BTD = x_BTD + swiglu(weights, layer, normed_BTD)
    x_BTD = rms_norm(x_BTD, weights["final_norm"])
    return F.linear(x_BTD, weights["embedding"])


def next_token_loss(weights: Weights, windows_BT1: Tensor, model: ModelSpec) -> Tensor:
    """Return the mean cross-entropy of the tokens after the first, in nats per token.

    Args:
        weights: the named parameters.
        windows_BT1: int64, shape (B, T + 1): all but the last are inputs, all
            but the first targets.
        model: the shape.

    Returns:
        Scalar, of the weights' dtype (fp32 under autocast).
    """
    logits_BTV = forward(weights, windows_BT1[:, :-1], model)
    return F.cross_entropy(logits_BTV.flatten(0, 1), windows_BT1[:, 1:].flatten())


def rms_norm(x_BTD: Tensor, scale_D: Tensor) -> Tensor:
    """Return x over its root mean square, times the gain; shape as x (arXiv:1910.07467)."""
    return F.rms_norm(x_BTD, scale_D.shape, scale_D, NORM_EPSILON)


def _attention(
    weights: Weights,
    layer: str,
    x_BTD: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    num_heads: int,
) -> Tensor:
    q_BNTH = split_heads(F.linear(x_BTD, weights[layer + "wq"]), num_heads)
    k_BNTH = split_heads(F.linear(x_BTD, weights[layer + "wk"]), num_heads)
    v_BNTH = split_heads(F.linear(x_BTD, weights[layer + "wv"]), num_heads)
    mixed_BNTH = F.scaled_dot_product_attention(
        rotate(q_BNTH, cos_TH, sin_TH), rotate(k_BNTH, cos_TH, sin_TH), v_BNTH, is_causal=True
    )
    return F.linear(mixed_BNTH.transpose(1, 2).flatten(2), weights[layer + "wo"])


def swiglu(weights: Weights, layer: str, x_BTD: Tensor) -> Tensor:
    """Return w2(silu(w1 x) * w3 x) of a layer; shape as x (arXiv:2002.05202)."""
    gate_BTF = F.silu(F.linear(x_BTD, weights[layer + "w1"]))
    return F.linear(gate_BTF * F.linear(x_BTD, weights[layer + "w3"]), weights[layer + "w2"])


def split_heads(x_BTD: Tensor, num_heads: int) -> Tensor:
    """Return x as (B, heads, T, dim / heads)."""
    return x_BTD.view(*x_BTD.shape[:2], num_heads, -1).transpose(1, 2)


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Return x with each pair of halves turned by its position's angle (RoPE, arXiv:2104.09864)."""
    first, second = x_BNTH.chunk(2, dim=-1)
    # The tables are of the weights' dtype; under autocast x is narrower and stays so.
    rotated = x_BNTH * cos_TH + torch.cat((-second, first), dim=-1) * sin_TH
    return rotated.to(x_BNTH.dtype)


@functools.lru_cache(maxsize=8)
def rope_tables(
    num_tokens: int, head_dim: int, base: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position times frequency, shape (T, H), computed in fp64 on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = torch.outer(torch.arange(num_tokens, dtype=torch.float64), base**-exponents)
    angles_TH = torch.cat((angles, angles), dim=-1)
    return angles_TH.cos().to(device, dtype), angles_TH.sin().to(device, dtype)
