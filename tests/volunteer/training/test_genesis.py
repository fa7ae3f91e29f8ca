"""Round 0: the same weights on every machine, and a golden vector that says which."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from blake3 import blake3

from tests.protocol import second_state
from tests.volunteer.training.synthetic import make_spec
from volunteer.run import GenesisSpec, ModelSpec
from volunteer.training import genesis
from volunteer.training.genesis import build_genesis, genesis_hash, integer_stream
from volunteer.training.layout import model_layout, num_parameters

GOLDEN_SEED_0 = [-70443, 39988, 9370, 4129, -52555, 65655]
GOLDEN_SEED_MAX = [1156, -40378, 44940]
GOLDEN_HASH = "6f870ad2f4995c13fcbf7869f7d4b4f132963713525df27afa44d241429bb414"
GOLDEN_WEIGHTS = ["-0x1.9ee53c0000000p-7", "0x1.3138d40000000p-8", "0x1.24823c0000000p-7"]


def test_the_integer_stream_is_the_golden_one() -> None:
    assert integer_stream(0, 0, 6).tolist() == GOLDEN_SEED_0
    assert integer_stream(2**62, 10**9, 10**9 + 3).tolist() == GOLDEN_SEED_MAX


def test_the_integer_stream_is_what_its_docstring_says() -> None:
    raw = blake3(b"allmende/genesis-weights/1\x00" + (5).to_bytes(8, "little")).digest(length=80)
    for index in range(10):
        draws = [
            int.from_bytes(raw[8 * index + at : 8 * index + at + 2], "little")
            for at in (0, 2, 4, 6)
        ]
        assert int(integer_stream(5, index, index + 1)[0]) == sum(draws) - 2 * 65535


def test_the_golden_genesis() -> None:
    spec = make_spec()
    state = build_genesis(spec)
    assert genesis_hash(spec) == GOLDEN_HASH == spec.genesis.state_hash
    assert [value.hex() for value in state.weights_P[:3].tolist()] == GOLDEN_WEIGHTS
    assert not bool(state.momentum_P.any())


def test_seed_and_shape_alone_decide() -> None:
    spec = make_spec()
    same = msgspec.structs.replace(spec, name="renamed")
    other = msgspec.structs.replace(spec, genesis=GenesisSpec(seed=8, state_hash="0" * 64))
    assert genesis_hash(same) == genesis_hash(spec)
    assert genesis_hash(other) != genesis_hash(spec)


def test_the_distribution() -> None:
    model = ModelSpec(num_layers=2, dim=64, num_heads=2, ffn_dim=96, context_tokens=16)
    spec = msgspec.structs.replace(make_spec(), model=model)
    weights_P = build_genesis(spec).weights_P
    for slot in model_layout(model):
        values = weights_P[slot.offset : slot.end]
        if slot.is_norm:
            assert bool((values == 1).all()), slot.name
            continue
        std = 0.02 / 2 if slot.name.endswith((".wo", ".w2")) else 0.02
        num = slot.num_elements
        assert float(values.std()) == pytest.approx(std, rel=4 / np.sqrt(2 * num)), slot.name
        assert abs(float(values.mean())) < 4 * std / np.sqrt(num), slot.name
        assert float(values.abs().max()) <= 3.47 * std, slot.name


def test_slices_do_not_change_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_P = build_genesis(make_spec()).weights_P
    monkeypatch.setattr(genesis, "_SLICE_ELEMENTS", 37)
    assert torch.equal(build_genesis(make_spec()).weights_P, whole_P)


def test_the_layout_has_no_gaps_and_the_agreed_names() -> None:
    model = ModelSpec(num_layers=2, dim=8, num_heads=2, ffn_dim=12, context_tokens=16)
    slots = model_layout(model)
    assert slots[0].offset == 0
    assert all(a.end == b.offset for a, b in itertools.pairwise(slots))
    assert num_parameters(model) == slots[-1].end == 256 * 8 + 2 * (16 + 4 * 64 + 3 * 96) + 8
    layer = ["attention_norm", "wq", "wk", "wv", "wo", "ffn_norm", "w1", "w3", "w2"]
    names = ["embedding"] + [f"layers.{i}.{name}" for i in range(2) for name in layer]
    assert [slot.name for slot in slots] == [*names, "final_norm"]
    assert {slot.name: slot.shape for slot in slots}["layers.1.w2"] == (8, 12)


def test_fewer_key_heads_and_an_output_of_its_own_have_their_place() -> None:
    model = ModelSpec(
        num_layers=1,
        dim=16,
        num_heads=4,
        num_kv_heads=2,
        tied_embeddings=False,
        ffn_dim=12,
        context_tokens=16,
    )
    shapes = {slot.name: slot.shape for slot in model_layout(model)}
    assert shapes["layers.0.wq"] == shapes["layers.0.wo"] == (16, 16)
    assert shapes["layers.0.wk"] == shapes["layers.0.wv"] == (8, 16)
    assert list(shapes)[-2:] == ["final_norm", "output"]
    assert shapes["output"] == shapes["embedding"] == (256, 16)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 1}, {"tied_embeddings": False}])
def test_the_second_implementation_makes_the_same_state(changes: dict[str, Any]) -> None:
    spec = make_spec()
    model = ModelSpec(
        num_layers=1, dim=8, num_heads=2, ffn_dim=8, context_tokens=8, vocab_size=64, **changes
    )
    spec = msgspec.structs.replace(spec, model=model)
    plain = msgspec.to_builtins(spec)
    assert second_state.genesis(plain).state_hash() == genesis_hash(spec)
