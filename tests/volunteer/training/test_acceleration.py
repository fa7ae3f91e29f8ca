"""Layers computed in other ways give what they give as they are written."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import clear_caches

from tests.volunteer.training.loop_bench import Bench, kinds, only
from volunteer.messages import StopTrainer
from volunteer.micro_batch import MicroBatchChosen
from volunteer.run import ModelSpec
from volunteer.training import acceleration, model
from volunteer.training.acceleration import make_loss_function, reason_of
from volunteer.training.layout import num_parameters
from volunteer.training.micro_batches import Wishes
from volunteer.training.model import LossFunction, TrainableWeights, next_token_loss

MODEL = ModelSpec(
    num_layers=2,
    dim=32,
    num_heads=4,
    num_kv_heads=2,
    tied_embeddings=False,
    ffn_dim=48,
    context_tokens=16,
    vocab_size=64,
)
MOST_DIFFERENCE = 2e-6
"""Of a compiled gradient from the plain one, relative to the norm: another order of sums."""


def gradient_of(loss_function: LossFunction, num_sequences: int = 3) -> tuple[float, Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights_P = 0.2 * torch.randn(num_parameters(MODEL), generator=generator)
    windows_BT1 = torch.randint(0, 64, (num_sequences, 17), generator=generator)
    weights = TrainableWeights(weights_P, MODEL)
    loss = loss_function(weights.parameters, windows_BT1, MODEL)
    loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
    return float(loss.detach()), weights.gradient_P


def test_checkpointed_gradients_are_the_same_bits() -> None:
    plain, plain_P = gradient_of(next_token_loss)
    again, again_P = gradient_of(make_loss_function(is_compiled=False, is_checkpointed=True))
    assert again == plain
    assert torch.equal(again_P, plain_P)
    assert float(plain_P.norm()) > 0.1


def test_checkpointing_computes_each_layer_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls = 0
    original = model.decoder_layer

    def counted(*args: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return original(*args)

    monkeypatch.setattr(acceleration, "decoder_layer", counted)
    gradient_of(make_loss_function(is_compiled=False, is_checkpointed=True))
    assert num_calls == 2 * MODEL.num_layers


def test_without_wishes_it_is_the_plain_function() -> None:
    assert make_loss_function(is_compiled=False, is_checkpointed=False) is next_token_loss


@pytest.fixture
def nothing_compiled() -> None:
    """Forget what this process has compiled: it would be taken again, and nothing be written."""
    acceleration._compiled_layer.cache_clear()
    torch.compiler.reset()
    clear_caches()


@pytest.mark.full
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it does itself
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_compiled_gradients_stay_near(
    is_checkpointed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = make_loss_function(is_compiled=True, is_checkpointed=is_checkpointed)
    for num_sequences in (3, 2, 1):
        plain, plain_P = gradient_of(next_token_loss, num_sequences)
        seen, seen_P = gradient_of(compiled, num_sequences)
        assert seen == pytest.approx(plain, rel=1e-6)
        assert float((seen_P - plain_P).norm()) < MOST_DIFFERENCE * float(plain_P.norm())
    assert any(tmp_path.rglob("*.so"))


def fail_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: object) -> Tensor:
        raise torch._dynamo.exc.TorchDynamoException("No working C++ compiler found\nand more")

    monkeypatch.setattr(acceleration, "_compiled_layer", lambda: run)


def test_where_nothing_can_be_compiled_it_trains_on_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_to_compile(monkeypatch)
    bench = Bench(tmp_path, wishes=Wishes(is_compiled=True))
    with caplog.at_level(logging.WARNING):
        events = bench.run(bench.rebase(), script={2: StopTrainer()})
    assert kinds(events).count("Stepped") == 2
    (told,) = only(events, MicroBatchChosen)
    assert isinstance(told, MicroBatchChosen)
    assert not told.micro_batch.is_compiled
    assert "not compiled, as wished: No working C++ compiler found" in told.micro_batch.note
    assert "not compiled" in caplog.text
    assert "and more" not in told.micro_batch.note


def test_a_stop_while_compiling_ends_the_process_with_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread is deaf then; another one ends the process."""
    bench = Bench(tmp_path, wishes=Wishes(is_compiled=True))

    def compile_for_long(*args: object) -> Tensor:
        bench.stop_from_outside()
        assert bench.has_ended.wait(10.0)
        raise torch._dynamo.exc.TorchDynamoException("the process would be gone by now")

    monkeypatch.setattr(acceleration, "_compiled_layer", lambda: compile_for_long)
    events = bench.run(bench.rebase())
    told = kinds(events)
    assert told[:4] == ["TrainerStarted", "Rebased", "Stopping", "SnapshotSaved"]
    assert "Stepped" not in told


def test_a_reason_is_one_short_line() -> None:
    assert reason_of(RuntimeError("a\nb")) == "a"
    assert reason_of(RuntimeError()) == "RuntimeError"
    assert len(reason_of(RuntimeError("x" * 999))) == 200
