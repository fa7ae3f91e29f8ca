"""The presets' shapes are those that were published, and their costs are counted, not written."""

from __future__ import annotations

import msgspec
import pytest

from volunteer.data.builtin import load_builtin_run
from volunteer.presets import PRESETS, preset_table, sequence_bytes
from volunteer.run import ModelSpec, verify_run_spec
from volunteer.training.layout import model_layout, num_parameters

GOLDEN = {
    "1m": 1_037_696,
    "5m": 4_812_032,
    "25m": 25_436_672,
    "100m": 99_309_312,
    "opendiloco-60m": 102_898_688,
    "opendiloco-150m": 214_983_680,
    "300m": 303_350_784,
    "opendiloco-1b": 1_100_048_384,
}
"""TinyLlama's 1,100,048,384 is what its publishers count."""


def counted(model: ModelSpec) -> int:
    """Count without the layout."""
    kv_dim = model.dim // model.num_heads * (model.num_kv_heads or model.num_heads)
    attention = 2 * model.dim**2 + 2 * kv_dim * model.dim
    layer = attention + 3 * model.dim * model.ffn_dim + 2 * model.dim
    embeddings = model.vocab_size * model.dim * (1 if model.tied_embeddings else 2)
    return embeddings + model.num_layers * layer + model.dim


def test_the_parameters_of_each_preset_are_counted_from_its_layout() -> None:
    assert {name: num_parameters(model) for name, model in PRESETS.items()} == GOLDEN
    assert {name: counted(model) for name, model in PRESETS.items()} == GOLDEN


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_makes_a_sound_run(name: str) -> None:
    demo = load_builtin_run("demo")
    # The bytes tokenizer wants 256; the presets' own tokenizers are the run's to name.
    model = msgspec.structs.replace(PRESETS[name], vocab_size=256)
    verify_run_spec(msgspec.structs.replace(demo, model=model), source=name)


def test_opendilocos_shapes_are_those_of_its_configs() -> None:
    shape = PRESETS["opendiloco-150m"]
    assert (shape.dim, shape.num_layers, shape.num_heads, shape.ffn_dim) == (1024, 12, 16, 2688)
    shape = PRESETS["opendiloco-1b"]
    assert (shape.dim, shape.num_layers, shape.num_heads, shape.ffn_dim) == (2048, 22, 32, 5632)
    assert shape.num_kv_heads == 4
    assert {slot.name: slot.shape for slot in model_layout(shape)}["layers.21.wk"] == (256, 2048)


def test_the_table_says_what_a_run_costs() -> None:
    table = {cost.name: cost for cost in preset_table()}
    assert list(table) == list(PRESETS)
    sizes = [cost.num_parameters for cost in table.values()]
    assert sizes == sorted(sizes)
    cost = table["opendiloco-1b"]
    assert cost.state_bytes == 8 * cost.num_parameters
    assert cost.blob_bytes == pytest.approx(cost.num_parameters / 2, rel=0.002)
    assert cost.vectors_bytes == 24 * cost.num_parameters
    assert cost.trainer_bytes > cost.vectors_bytes
    assert cost.checkpointed_sequence_bytes < cost.sequence_bytes / 5


def test_activations_grow_with_the_context_and_the_layers() -> None:
    model = PRESETS["25m"]
    longer = msgspec.structs.replace(model, context_tokens=2 * model.context_tokens)
    deeper = msgspec.structs.replace(model, num_layers=2 * model.num_layers)
    for is_checkpointed in (False, True):
        one = sequence_bytes(model, is_checkpointed=is_checkpointed)
        assert sequence_bytes(longer, is_checkpointed=is_checkpointed) == 2 * one
        assert sequence_bytes(deeper, is_checkpointed=is_checkpointed) > one
