"""Where each parameter lies in the one flat vector that members share.

Runs in: trainer, aggregator. Pure shape arithmetic, no torch.

Everything that members exchange or hash (weights, momentum, pseudo-gradients) is one flat fp32
vector, suffix `_P`. The layout is part of the run's meaning: changing it changes every state hash.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from volunteer.run import ModelSpec

LAYER_NAMES = ("attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w3", "w2")
"""Of the parameters of a decoder layer, in their order."""


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """One parameter tensor, row-major, inside the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    """Index of its first element."""

    @property
    def num_elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """Index just behind its last element."""
        return self.offset + self.num_elements

    @property
    def is_norm(self) -> bool:
        """Whether it is the gain of an RMSNorm; every other parameter is a matrix."""
        return len(self.shape) == 1


def model_layout(model: ModelSpec) -> tuple[ParameterSlot, ...]:
    """Return the slots of `model`, in order and without gaps.

    Where the output projection is tied to "embedding" it has no slot of its own; else it comes
    last.
    """
    slots: list[ParameterSlot] = []
    offset = 0
    for name, shape in _names_and_shapes(model):
        slots.append(ParameterSlot(name, shape, offset))
        offset = slots[-1].end
    return tuple(slots)


def num_parameters(model: ModelSpec) -> int:
    """Return P, the length of the flat vector."""
    return model_layout(model)[-1].end


def _names_and_shapes(model: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    dim, ffn_dim, kv_dim = model.dim, model.ffn_dim, model.kv_heads * model.head_dim
    shapes = {
        "attention_norm": (dim,),
        "wq": (dim, dim),
        "wk": (kv_dim, dim),
        "wv": (kv_dim, dim),
        "wo": (dim, dim),
        "ffn_norm": (dim,),
        "w1": (ffn_dim, dim),
        "w3": (ffn_dim, dim),
        "w2": (dim, ffn_dim),
    }
    yield "embedding", (model.vocab_size, dim)
    for index in range(model.num_layers):
        for name in LAYER_NAMES:
            yield f"layers.{index}.{name}", shapes[name]
    yield "final_norm", (dim,)
    if not model.tied_embeddings:
        yield "output", (model.vocab_size, dim)
