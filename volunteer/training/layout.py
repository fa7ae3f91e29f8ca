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

    The output projection is tied to "embedding" and has no slot of its own.
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
    dim, ffn_dim = model.dim, model.ffn_dim
    yield "embedding", (model.vocab_size, dim)
    for index in range(model.num_layers):
        layer = f"layers.{index}."
        yield layer + "attention_norm", (dim,)
        for name in ("wq", "wk", "wv", "wo"):
            yield layer + name, (dim, dim)
        yield layer + "ffn_norm", (dim,)
        yield layer + "w1", (ffn_dim, dim)
        yield layer + "w3", (ffn_dim, dim)
        yield layer + "w2", (dim, ffn_dim)
    yield "final_norm", (dim,)
