"""Muon: what it does to a matrix, and that it is torch's where torch has it."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from tests.volunteer.training.tiny_run import CPU, never, tiny_spec, tiny_weights_P, tiny_windows
from volunteer.run import RunSpec
from volunteer.training import diloco
from volunteer.training.adamw import AdamState, adamw_step, decay_ranges
from volunteer.training.diloco import LocalState
from volunteer.training.layout import ParameterSlot, model_layout
from volunteer.training.muon import is_orthogonalised, muon_step, orthogonalise
from volunteer.training.snapshot import SnapshotStore


def muon_spec(*, momentum: float = 0.95) -> RunSpec:
    spec = tiny_spec()
    inner = msgspec.structs.replace(spec.inner, optimizer="muon", muon_momentum=momentum)
    return msgspec.structs.replace(spec, inner=inner)


SPEC = muon_spec()


def random_matrix(shape: tuple[int, int], seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", [(16, 16), (24, 16), (16, 24), (96, 8)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_singular_values_come_near_one_and_directions_stay(
    shape: tuple[int, int], scale: float
) -> None:
    matrix_AB = random_matrix(shape) * scale
    result_AB = orthogonalise(matrix_AB, torch.float64)
    values = torch.linalg.svdvals(result_AB)
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.3
    left, _, right = torch.linalg.svd(matrix_AB, full_matrices=False)
    turned = left.T @ result_AB @ right.T
    off_diagonal = turned - torch.diag(torch.diagonal(turned))
    assert float(off_diagonal.abs().max()) < 1e-9


def test_nothing_comes_of_nothing() -> None:
    assert not bool(orthogonalise(torch.zeros(4, 6), torch.float32).any())


def plain_orthogonalise(matrix_AB: Tensor) -> Tensor:
    """The polynomial on each singular value."""
    left, values, right = torch.linalg.svd(matrix_AB, full_matrices=False)
    values = values / torch.linalg.vector_norm(values)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    result_AB: Tensor = left @ torch.diag(values) @ right
    return result_AB


def test_five_steps_equal_a_plain_implementation() -> None:
    """With momentum, Nesterov, decay and scale as their formulas are; what is left by AdamW."""
    inner = SPEC.inner
    ours_P, alone_P = (tiny_weights_P(SPEC, torch.float64) for _ in range(2))
    matrices = {slot: alone_P[slot.offset : slot.end].clone() for slot in hidden_matrices()}
    momenta = {slot: torch.zeros_like(matrix) for slot, matrix in matrices.items()}
    adam, adam_alone = AdamState.zeros_like(ours_P), AdamState.zeros_like(ours_P)
    for num_steps in range(1, 6):
        gradient_P = random_matrix((1, len(ours_P)), num_steps).flatten()
        muon_step(
            ours_P,
            gradient_P,
            adam,
            inner,
            SPEC.model,
            lr=0.01,
            num_steps=num_steps,
            product_dtype=torch.float64,
        )
        ranges = decay_ranges(SPEC.model)
        adamw_step(
            alone_P, gradient_P, adam_alone, inner, lr=0.01, num_steps=num_steps, ranges=ranges
        )
        for slot, matrix in matrices.items():
            gradient = gradient_P[slot.offset : slot.end]
            momenta[slot] = 0.95 * momenta[slot] + 0.05 * gradient
            ahead = 0.05 * gradient + 0.95 * momenta[slot]
            update = plain_orthogonalise(ahead.view(slot.shape)).flatten()
            rms = 0.2 * math.sqrt(max(slot.shape))
            matrices[slot] = matrix - 0.01 * (rms * update + inner.weight_decay * matrix)
    for slot in model_layout(SPEC.model):
        seen = ours_P[slot.offset : slot.end]
        due = matrices.get(slot, alone_P[slot.offset : slot.end])
        torch.testing.assert_close(seen, due, rtol=0, atol=1e-9, msg=slot.name)
        assert bool(adam.square_P[slot.offset : slot.end].any()) != (slot in matrices)


def hidden_matrices() -> list[ParameterSlot]:
    return [slot for slot in model_layout(SPEC.model) if is_orthogonalised(slot)]


def test_the_hidden_matrices_and_nothing_else_are_orthogonalised() -> None:
    names = [slot.name for slot in model_layout(SPEC.model) if is_orthogonalised(slot)]
    assert names == [f"layers.0.{name}" for name in ("wq", "wk", "wv", "wo", "w1", "w3", "w2")]


@pytest.mark.slow
def test_bfloat16_products_are_torchs_muon() -> None:
    """torch.optim.Muon computes in bfloat16 whatever the weights are."""
    ours_P = tiny_weights_P(SPEC)
    theirs = {
        slot: ours_P[slot.offset : slot.end].clone().view(slot.shape).requires_grad_()
        for slot in model_layout(SPEC.model)
        if is_orthogonalised(slot)
    }
    optimizer = torch.optim.Muon(
        theirs.values(),
        lr=0.01,
        weight_decay=SPEC.inner.weight_decay,
        momentum=0.95,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = AdamState.zeros_like(ours_P)
    for num_steps in range(1, 6):
        gradient_P = random_matrix((1, len(ours_P)), num_steps).flatten().float()
        muon_step(
            ours_P,
            gradient_P,
            adam,
            SPEC.inner,
            SPEC.model,
            lr=0.01,
            num_steps=num_steps,
            product_dtype=torch.bfloat16,
        )
        for slot, parameter in theirs.items():
            parameter.grad = gradient_P[slot.offset : slot.end].view(slot.shape)
        optimizer.step()  # type: ignore[no-untyped-call]  # torch has no type for it
    for slot, parameter in theirs.items():
        seen = ours_P[slot.offset : slot.end].view(slot.shape)
        # Of a step's 0.002 * sqrt(24), what bfloat16 rounds: 1 part of 256, five times.
        torch.testing.assert_close(seen, parameter.detach(), rtol=0, atol=4e-4)


def trained(num_steps: int, state: LocalState | None = None) -> LocalState:
    state = state or diloco.fresh_state(tiny_weights_P(SPEC), SPEC, CPU)
    for _ in range(num_steps):
        diloco.train(
            state,
            tiny_windows(SPEC, state.progress.inner_step),
            SPEC,
            micro_batch_sequences=2,
            device=CPU,
            should_stop=never,
        )
    return state


def test_training_goes_on_from_a_snapshot_bit_for_bit(tmp_path: Path) -> None:
    straight = trained(10)
    store = SnapshotStore(tmp_path, SPEC, "dense")
    store.save(trained(5))
    loaded = store.load(CPU)
    assert loaded is not None
    resumed = trained(5, loaded)
    assert torch.equal(resumed.theta_P, straight.theta_P)
    assert torch.equal(resumed.adam.mean_P, straight.adam.mean_P)
    assert not torch.equal(straight.theta_P, tiny_weights_P(SPEC))


def test_running_out_of_memory_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained(1)
    before = [t.clone() for t in (state.theta_P, state.adam.mean_P, state.adam.square_P)]
    num_calls = 0
    addmm = torch.addmm

    def failing(x: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float = 1) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 25:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return addmm(x, left, right, beta=beta, alpha=alpha)

    monkeypatch.setattr(torch, "addmm", failing)
    with pytest.raises(torch.OutOfMemoryError):
        trained(1, state)
    after = (state.theta_P, state.adam.mean_P, state.adam.square_P)
    assert all(torch.equal(seen, old) for seen, old in zip(after, before, strict=True))
    assert state.progress.inner_step == 1


def test_a_step_in_bfloat16_products_stays_near_the_one_in_fp32() -> None:
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        weights_P = tiny_weights_P(SPEC)
        gradient_P = random_matrix((1, len(weights_P))).flatten().float()
        adam = AdamState.zeros_like(weights_P)
        muon_step(
            weights_P,
            gradient_P,
            adam,
            SPEC.inner,
            SPEC.model,
            lr=0.01,
            num_steps=1,
            product_dtype=dtype,
        )
        ends.append(weights_P - tiny_weights_P(SPEC))
    assert float((ends[0] - ends[1]).norm()) < 0.02 * float(ends[0].norm())


def test_it_learns() -> None:
    state = diloco.fresh_state(tiny_weights_P(SPEC), SPEC, CPU)
    losses = []
    for _ in range(60):
        windows_BT1 = tiny_windows(SPEC, state.progress.inner_step)
        result = diloco.train(
            state, windows_BT1, SPEC, micro_batch_sequences=4, device=CPU, should_stop=never
        )
        assert result is not None
        losses.append(result.loss)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5
