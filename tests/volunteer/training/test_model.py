"""The model against a plain implementation, and the properties it must have."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from volunteer.run import ModelSpec
from volunteer.training.layout import model_layout, num_parameters
from volunteer.training.model import TrainableWeights, forward, next_token_loss, weights_of
from volunteer.training.sample import Reader

MODEL = ModelSpec(
    num_layers=2, dim=24, num_heads=3, ffn_dim=40, context_tokens=16, vocab_size=50, rope_base=100.0
)

GROUPED = ModelSpec(
    num_layers=2,
    dim=32,
    num_heads=4,
    num_kv_heads=2,
    tied_embeddings=False,
    ffn_dim=40,
    context_tokens=16,
    vocab_size=50,
    rope_base=100.0,
)
ONE_KEY = ModelSpec(
    num_layers=1, dim=24, num_heads=3, num_kv_heads=1, ffn_dim=40, context_tokens=16, vocab_size=50
)


def random_weights_P(model: ModelSpec = MODEL, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_parameters(model), generator=generator, dtype=torch.float64) * 0.3


def random_tokens(num_sequences: int, num_tokens: int, seed: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, MODEL.vocab_size, (num_sequences, num_tokens), generator=generator)


def plain_logits(weights_P: Tensor, tokens: list[int], model: ModelSpec) -> Tensor:
    """One sequence, position by position, head by head: no batch, no fused kernels, no views."""
    flat = weights_P.tolist()
    named = {
        slot.name: torch.tensor(flat[slot.offset : slot.end], dtype=torch.float64).reshape(
            slot.shape
        )
        for slot in model_layout(model)
    }
    head = model.dim // model.num_heads
    kv_heads = model.num_kv_heads or model.num_heads

    def norm(x: Tensor, scale: Tensor) -> Tensor:
        return x / math.sqrt(float((x * x).mean()) + 1e-5) * scale

    def rotate(x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for j in range(head // 2):
            angle = position * model.rope_base ** (-2 * j / head)
            a, b = x[j], x[j + head // 2]
            out[j] = a * math.cos(angle) - b * math.sin(angle)
            out[j + head // 2] = a * math.sin(angle) + b * math.cos(angle)
        return out

    stream = [named["embedding"][token] for token in tokens]
    for i in range(model.num_layers):
        layer = {
            slot.name.removeprefix(f"layers.{i}."): named[slot.name]
            for slot in model_layout(model)
            if slot.name.startswith(f"layers.{i}.")
        }
        normed = [norm(x, layer["attention_norm"]) for x in stream]
        mixed = [torch.zeros(model.dim, dtype=torch.float64) for _ in stream]
        for h in range(model.num_heads):
            rows = slice(h * head, (h + 1) * head)
            q = [rotate((layer["wq"] @ x)[rows], t) for t, x in enumerate(normed)]
            shared = h * kv_heads // model.num_heads
            kv_rows = slice(shared * head, (shared + 1) * head)
            k = [rotate((layer["wk"] @ x)[kv_rows], t) for t, x in enumerate(normed)]
            v = [(layer["wv"] @ x)[kv_rows] for x in normed]
            for t in range(len(tokens)):
                scores = [math.exp(float(q[t] @ k[s]) / math.sqrt(head)) for s in range(t + 1)]
                for s in range(t + 1):
                    mixed[t][rows] += scores[s] / sum(scores) * v[s]
        stream = [x + layer["wo"] @ m for x, m in zip(stream, mixed, strict=True)]
        normed = [norm(x, layer["ffn_norm"]) for x in stream]
        for t, x in enumerate(normed):
            gate = layer["w1"] @ x
            hidden = gate / (1 + torch.exp(-gate)) * (layer["w3"] @ x)
            stream[t] = stream[t] + layer["w2"] @ hidden
    output = named["embedding"] if model.tied_embeddings else named["output"]
    return torch.stack([output @ norm(x, named["final_norm"]) for x in stream])


@pytest.mark.parametrize("model", [MODEL, GROUPED, ONE_KEY], ids=["plain", "grouped", "one-key"])
def test_logits_equal_the_plain_implementation(model: ModelSpec) -> None:
    weights_P, tokens_BT = random_weights_P(model), random_tokens(2, 9)
    logits_BTV = forward(weights_of(weights_P, model), tokens_BT, model)
    for row in range(2):
        expected_TV = plain_logits(weights_P, tokens_BT[row].tolist(), model)
        torch.testing.assert_close(logits_BTV[row], expected_TV, rtol=1e-10, atol=1e-10)


def test_a_later_token_changes_no_earlier_logit() -> None:
    weights = weights_of(random_weights_P(), MODEL)
    tokens_BT = random_tokens(1, 12)
    before_TV = forward(weights, tokens_BT, MODEL)[0]
    for changed in range(1, 12):
        other_BT = tokens_BT.clone()
        other_BT[0, changed] = (other_BT[0, changed] + 1) % MODEL.vocab_size
        after_TV = forward(weights, other_BT, MODEL)[0]
        torch.testing.assert_close(after_TV[:changed], before_TV[:changed], rtol=0, atol=1e-12)
        assert not torch.allclose(after_TV[changed], before_TV[changed])


def test_loss_is_the_mean_cross_entropy_of_the_shifted_tokens() -> None:
    weights = weights_of(random_weights_P(), MODEL)
    windows_BT1 = random_tokens(3, 8)
    log_probabilities = forward(weights, windows_BT1[:, :-1], MODEL).log_softmax(-1)
    picked = [
        -float(log_probabilities[b, t, windows_BT1[b, t + 1]]) for b in range(3) for t in range(7)
    ]
    loss = next_token_loss(weights, windows_BT1, MODEL)
    assert float(loss) == pytest.approx(sum(picked) / len(picked), rel=1e-12)


@pytest.mark.parametrize("model", [MODEL, GROUPED], ids=["plain", "grouped"])
def test_the_flat_gradient_is_the_gradient_by_differences(model: ModelSpec) -> None:
    weights_P, windows_BT1 = random_weights_P(model), random_tokens(2, 8)
    trainable = TrainableWeights(weights_P, model)
    next_token_loss(trainable.parameters, windows_BT1, model).backward()  # type: ignore[no-untyped-call]
    gradient_P = trainable.gradient_P.clone()
    for slot in model_layout(model):
        index = slot.offset + slot.num_elements // 2
        losses = []
        for shift in (1e-5, -1e-5):
            moved_P = weights_P.clone()
            moved_P[index] += shift
            losses.append(float(next_token_loss(weights_of(moved_P, model), windows_BT1, model)))
        numeric = (losses[0] - losses[1]) / 2e-5
        assert float(gradient_P[index]) == pytest.approx(numeric, rel=1e-4, abs=1e-7), slot.name


def test_backward_passes_add_up_in_the_flat_gradient() -> None:
    trainable = TrainableWeights(random_weights_P(), MODEL)
    windows_BT1 = random_tokens(2, 8)
    next_token_loss(trainable.parameters, windows_BT1, MODEL).backward()  # type: ignore[no-untyped-call]
    once_P = trainable.gradient_P.clone()
    next_token_loss(trainable.parameters, windows_BT1, MODEL).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(trainable.gradient_P, 2 * once_P, rtol=1e-12, atol=1e-15)


def test_views_share_the_flat_vector_and_a_wrong_length_is_refused() -> None:
    weights_P = random_weights_P()
    weights = weights_of(weights_P, MODEL)
    weights_P.zero_()
    assert all(not bool(view.any()) for view in weights.values())
    with pytest.raises(ValueError, match="parameters"):
        weights_of(weights_P[:-1], MODEL)


def test_bfloat16_autocast_stays_close_to_fp32() -> None:
    weights_P = random_weights_P().float() * 0.3
    windows_BT1 = random_tokens(2, 12)
    exact = float(next_token_loss(weights_of(weights_P, MODEL), windows_BT1, MODEL))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = next_token_loss(weights_of(weights_P, MODEL), windows_BT1, MODEL)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("model", [MODEL, GROUPED, ONE_KEY], ids=["plain", "grouped", "one-key"])
def test_reading_one_token_after_the_other_gives_the_same_logits(model: ModelSpec) -> None:
    weights = weights_of(random_weights_P(model), model)
    tokens = random_tokens(1, 9)[0].tolist()
    reader = Reader(weights, model)
    seen = [reader.read(tokens[:3])] + [reader.read([token]) for token in tokens[3:]]
    due_TV = forward(weights, torch.tensor([tokens]), model)[0]
    torch.testing.assert_close(torch.stack(seen), due_TV[2:], rtol=1e-10, atol=1e-10)
