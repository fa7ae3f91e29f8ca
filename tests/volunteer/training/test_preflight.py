"""The trial before the first step: it changes nothing, finds what fits, and explains itself."""

from __future__ import annotations

import msgspec
import pytest
import torch
from torch import Tensor

from tests.volunteer.training.tiny_run import CPU, never, tiny_spec, tiny_weights_P, tiny_windows
from volunteer.errors import OutOfGpuMemoryError
from volunteer.micro_batch import MicroBatch
from volunteer.run import ModelSpec, RunSpec
from volunteer.training import memory
from volunteer.training.micro_batches import MicroBatches, Wishes
from volunteer.training.model import TrainableWeights, Weights, next_token_loss
from volunteer.training.preflight import find_micro_batch

SPEC = tiny_spec()
GB = 10**9


def find(
    batches: MicroBatches, weights: TrainableWeights | None = None, spec: RunSpec = SPEC
) -> MicroBatch:
    found = find_micro_batch(
        weights or TrainableWeights(tiny_weights_P(spec), spec.model),
        tiny_windows(spec, 0),
        spec,
        CPU,
        batches,
        should_stop=never,
        now_s=lambda: 0.0,
    )
    assert found is not None
    return found


def fit_at_most(
    monkeypatch: pytest.MonkeyPatch, most: int, most_checkpointed: int = 0
) -> list[tuple[int, bool]]:
    """Have only so many sequences fit; return what is tried."""
    tried = []

    def loss_function(batches: MicroBatches) -> object:
        def loss(weights: Weights, windows_BT1: Tensor, model: ModelSpec) -> Tensor:
            tried.append((len(windows_BT1), batches.is_checkpointed))
            if len(windows_BT1) > (most_checkpointed if batches.is_checkpointed else most):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return next_token_loss(weights, windows_BT1, model)

        return loss

    monkeypatch.setattr(MicroBatches, "loss_function", property(loss_function))
    return tried


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_trial_that_fits_changes_nothing(optimizer: str) -> None:
    inner = msgspec.structs.replace(SPEC.inner, optimizer=optimizer)
    spec = msgspec.structs.replace(SPEC, inner=inner)
    weights = TrainableWeights(tiny_weights_P(spec), spec.model)
    found = find(MicroBatches(spec, CPU), weights, spec)
    assert torch.equal(weights.weights_P, tiny_weights_P(spec))
    assert not bool(weights.gradient_P.any())
    assert (found.sequences, found.context_tokens, found.tried) == (4, 16, ())
    assert found.note.startswith("4 sequences of 16 tokens at a time; ")


def test_it_says_what_was_free_and_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 3 * GB)
    monkeypatch.setattr(memory, "peak_bytes", lambda device: 412_000_000)
    found = find(MicroBatches(SPEC, CPU))
    assert (found.free_bytes, found.used_bytes) == (3 * GB, 412_000_000)
    assert found.note == (
        "4 sequences of 16 tokens at a time; 412 MB used; 3.0 GB were free before"
    )


def test_what_does_not_fit_is_halved_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fit_at_most(monkeypatch, 1)
    batches = MicroBatches(SPEC, CPU)
    weights = TrainableWeights(tiny_weights_P(SPEC), SPEC.model)
    found = find(batches, weights)
    assert [size for size, _ in tried] == [4, 2, 1]
    assert (found.sequences, found.tried, batches.sequences) == (1, (4, 2), 1)
    assert "1 sequence of 16 tokens" in found.note
    assert "4, 2 did not fit" in found.note
    assert not bool(weights.gradient_P.any())


def test_once_it_has_fitted_only_one_halving_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = MicroBatches(SPEC, CPU)
    find(batches)
    batches.halve(MemoryError("others need it"))
    with pytest.raises(OutOfGpuMemoryError, match="less and less"):
        batches.halve(MemoryError("others need more"))


def test_layers_are_computed_twice_where_not_one_sequence_fits_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = fit_at_most(monkeypatch, 0, most_checkpointed=2)
    found = find(MicroBatches(SPEC, CPU, Wishes(checkpointing="auto")))
    plain = [(4, False), (2, False), (1, False)]
    assert tried == [*plain, (4, True), (2, True)]
    assert found.is_checkpointed
    assert found.sequences == 2
    assert "computed twice" in found.note


def test_the_owner_may_forbid_that(monkeypatch: pytest.MonkeyPatch) -> None:
    fit_at_most(monkeypatch, 0, most_checkpointed=4)
    with pytest.raises(OutOfGpuMemoryError, match="one sequence"):
        find(MicroBatches(SPEC, CPU, Wishes(checkpointing="off")))


def test_memory_that_a_cpu_clearly_lacks_is_not_tried_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fit_at_most(monkeypatch, 4)
    needed_bytes = MicroBatches(SPEC, CPU).needed_bytes
    monkeypatch.setattr(memory, "free_bytes", lambda device: needed_bytes)
    assert find(MicroBatches(SPEC, CPU)).sequences == 2
    assert [size for size, _ in tried] == [2]


@pytest.mark.parametrize(
    ("first_takes_s", "sequences", "note"),
    [(0.4, 4, ""), (0.9, 2, "4 took longer than 0.5 s"), (30.0, 1, "4 took longer than 0.5 s")],
)
def test_a_slow_machine_begins_with_what_is_over_soon(
    monkeypatch: pytest.MonkeyPatch, first_takes_s: float, sequences: int, note: str
) -> None:
    tried = fit_at_most(monkeypatch, 4)
    batches = MicroBatches(SPEC, CPU)
    weights = TrainableWeights(tiny_weights_P(SPEC), SPEC.model)
    found = find_micro_batch(
        weights,
        tiny_windows(SPEC, 0),
        SPEC,
        CPU,
        batches,
        should_stop=never,
        now_s=lambda: first_takes_s * len(tried),
    )
    assert found is not None
    assert (found.sequences, batches.sequences, found.tried) == (sequences, sequences, ())
    assert [size for size, _ in tried] == [4], "the smaller ones need no trial"
    assert note in found.note
    assert ("took longer" in found.note) == bool(note)


def test_compiling_says_nothing_about_how_long_a_micro_batch_takes() -> None:
    batches = MicroBatches(SPEC, CPU, Wishes(is_compiled=True))
    batches.note_trial(90.0)
    assert (batches.sequences, batches.too_slow) == (4, 0)


def test_a_stop_ends_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fit_at_most(monkeypatch, 0)
    weights = TrainableWeights(tiny_weights_P(SPEC), SPEC.model)
    found = find_micro_batch(
        weights,
        tiny_windows(SPEC, 0),
        SPEC,
        CPU,
        MicroBatches(SPEC, CPU),
        should_stop=lambda: len(tried) == 1,
        now_s=lambda: 0.0,
    )
    assert found is None
    assert len(tried) == 1


def test_another_error_is_nobodys_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(weights: Weights, windows_BT1: Tensor, model: ModelSpec) -> Tensor:
        raise RuntimeError("a kernel is broken")

    monkeypatch.setattr(MicroBatches, "loss_function", property(lambda _: loss))
    with pytest.raises(RuntimeError, match="kernel"):
        find(MicroBatches(SPEC, CPU))


def test_the_machines_memory_is_what_a_cpu_has() -> None:
    free = memory.free_bytes(torch.device("cpu"))
    assert free is not None
    assert free > 0
    held = torch.ones(2**24)
    assert memory.peak_bytes(torch.device("cpu")) >= held.nbytes
