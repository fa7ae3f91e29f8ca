"""Shapes of models, from one million parameters to 1.1 billion, and what each of them costs.

Runs in: the command line, packaging, the lab. Pure, no torch.

Those of a byte-level run have 256 tokens, the bytes, and share the embedding with the output. The
others are for tokenizers of 32,000 tokens. `opendiloco-*` are the shapes of OpenDiLoCo's configs
(arXiv:2407.07852; open_diloco/configs/config_{60m,150m,1b}.json of its repository: what they leave
out is LlamaForCausalLM's default, thus 32,000 tokens and an output matrix of its own, so that the
150M one has 215 million parameters with its embeddings; the 1.1B one is TinyLlama's).
"""

from __future__ import annotations

from dataclasses import dataclass

from volunteer.run import CodecSpec, ModelSpec
from volunteer.training.layout import num_parameters

_FLOAT_BYTES = 4
_BYTES = 256
_LLAMA_VOCAB = 32_000


def _opendiloco(num_layers: int) -> ModelSpec:
    return ModelSpec(
        num_layers=num_layers,
        dim=1024,
        num_heads=16,
        ffn_dim=2688,
        context_tokens=1024,
        vocab_size=_LLAMA_VOCAB,
        tied_embeddings=False,
    )


def _byte_model(
    num_layers: int, dim: int, num_heads: int, ffn_dim: int, context_tokens: int
) -> ModelSpec:
    return ModelSpec(
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        ffn_dim=ffn_dim,
        context_tokens=context_tokens,
        vocab_size=_BYTES,
    )


PRESETS: dict[str, ModelSpec] = {
    "1m": _byte_model(5, 128, 4, 352, 128),
    "5m": _byte_model(6, 256, 8, 688, 256),
    "25m": _byte_model(8, 512, 8, 1376, 256),
    "100m": _byte_model(14, 768, 12, 2048, 512),
    "opendiloco-60m": _opendiloco(3),
    "opendiloco-150m": _opendiloco(12),
    "300m": ModelSpec(
        num_layers=24,
        dim=1024,
        num_heads=16,
        num_kv_heads=4,
        ffn_dim=2816,
        context_tokens=1024,
        vocab_size=_LLAMA_VOCAB,
    ),
    "opendiloco-1b": ModelSpec(
        num_layers=22,
        dim=2048,
        num_heads=32,
        num_kv_heads=4,
        ffn_dim=5632,
        context_tokens=1024,
        vocab_size=_LLAMA_VOCAB,
        tied_embeddings=False,
    ),
}
"""By name, from small to large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PresetCost:
    """What one volunteer's part in a run of a preset needs."""

    name: str
    model: ModelSpec
    num_parameters: int
    state_bytes: int
    """Of the shared state's file: weights and outer momentum."""
    blob_bytes: int
    """Of a contribution in int4, without its header; sent once and fetched from each other."""
    vectors_bytes: int
    """Of the trainer: weights, gradient and two moments on the device; base and residual beside."""
    sequence_bytes: int
    """Of one sequence's activations in fp32, about: `sequence_bytes`."""
    checkpointed_sequence_bytes: int
    """The same where activations are computed again in the backward pass."""

    @property
    def trainer_bytes(self) -> int:
        """What a trainer holds at least, with a micro-batch of one sequence; libraries beside."""
        return self.vectors_bytes + self.sequence_bytes


def preset_table() -> tuple[PresetCost, ...]:
    """Return what each preset costs, from small to large."""
    return tuple(cost_of(name, model) for name, model in PRESETS.items())


def cost_of(name: str, model: ModelSpec) -> PresetCost:
    """Return what a model of any shape costs, under a name."""
    num = num_parameters(model)
    return PresetCost(
        name=name,
        model=model,
        num_parameters=num,
        state_bytes=2 * _FLOAT_BYTES * num,
        blob_bytes=int(CodecSpec().bytes_per_parameter * num),
        vectors_bytes=6 * _FLOAT_BYTES * num,
        sequence_bytes=sequence_bytes(model, is_checkpointed=False),
        checkpointed_sequence_bytes=sequence_bytes(model, is_checkpointed=True),
    )


def sequence_bytes(model: ModelSpec, *, is_checkpointed: bool) -> int:
    """Return about how much a backward pass of one sequence holds at most, in fp32.

    A layer keeps its input, both normed inputs, queries, keys and values, what the heads have read
    (twice), what is between its halves, and four of SwiGLU's width; at the end there are three of
    the vocabulary's size. Checkpointed, layers keep their inputs, and one is whole at a time.
    """
    kv_dim = model.kv_heads * model.head_dim
    of_layer = 7 * model.dim + 2 * kv_dim + 4 * model.ffn_dim
    of_end = 2 * model.dim + 3 * model.vocab_size
    if is_checkpointed:
        of_layers = model.num_layers * model.dim + of_layer
    else:
        of_layers = model.num_layers * of_layer
    return _FLOAT_BYTES * model.context_tokens * (of_layers + of_end)
