"""The outer step is torch's Nesterov, and moves against the pseudo-gradient's sign."""

from __future__ import annotations

import pytest
import torch

from tests.volunteer.training.synthetic import gradient
from volunteer.run import OuterSpec
from volunteer.training.outer import outer_step

P = 101


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.5), (0.7, 0.9), (1.0, 0.0), (0.31, 0.37)])
def test_it_is_nesterov(lr: float, momentum: float) -> None:
    parameter = torch.nn.Parameter(gradient("start", P, scale=1.0).double())
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=momentum > 0)
    weights_P, momentum_P = parameter.detach().clone(), torch.zeros(P, dtype=torch.float64)
    for round_index in range(50):
        aggregate_P = gradient(f"q-{round_index}", P, scale=1.0).double()
        parameter.grad = aggregate_P.clone()
        optimizer.step()
        weights_P, momentum_P = outer_step(
            weights_P, momentum_P, aggregate_P, OuterSpec(lr=lr, momentum=momentum)
        )
        assert float((weights_P - parameter.detach()).abs().max()) < 1e-12
    assert float(weights_P.abs().max()) > 0.1


def test_it_subtracts() -> None:
    weights_P, momentum_P = outer_step(
        torch.tensor([1.0]), torch.tensor([0.5]), torch.tensor([2.0]), OuterSpec(lr=0.5)
    )
    assert momentum_P.tolist() == [2.25]  # 0.5 * 0.5 + 2
    assert weights_P.tolist() == [1.0 - 0.5 * (2.0 + 0.5 * 2.25)]


def test_the_first_rounds_may_have_another_momentum() -> None:
    outer = OuterSpec(lr=0.7, momentum=0.9, momentum_warmup_rounds=3, warmup_momentum=0.5)
    assert [outer.at_round(r).momentum for r in range(5)] == [0.5, 0.5, 0.5, 0.9, 0.9]
    assert outer.at_round(0) == OuterSpec(lr=0.7, momentum=0.5)
    with pytest.raises(ValueError, match="round"):
        outer_step(torch.ones(1), torch.ones(1), torch.ones(1), outer)


def test_fp32_is_fp64_rounded_once() -> None:
    weights_P, momentum_P, aggregate_P = (gradient(name, P, scale=1.0) for name in "wmq")
    before_P = weights_P.clone()
    outer = OuterSpec(lr=0.7, momentum=0.3)
    new_weights_P, new_momentum_P = outer_step(weights_P, momentum_P, aggregate_P, outer)
    assert torch.equal(weights_P, before_P)
    for g, m, q, new_g, new_m in zip(
        *(x.tolist() for x in (weights_P, momentum_P, aggregate_P, new_weights_P, new_momentum_P)),
        strict=True,
    ):
        plain_m = torch.tensor(m * 0.3 + q, dtype=torch.float64).float().item()
        plain_g = torch.tensor(g - (plain_m * 0.3 + q) * 0.7, dtype=torch.float64).float().item()
        assert (new_g, new_m) == (plain_g, plain_m)


def test_slices_do_not_change_the_result() -> None:
    weights_P, momentum_P, aggregate_P = (gradient(name, P) for name in "wmq")
    whole = outer_step(weights_P, momentum_P, aggregate_P, OuterSpec())
    cuts = [slice(start, start + 7) for start in range(0, P, 7)]
    parts = [
        outer_step(weights_P[cut], momentum_P[cut], aggregate_P[cut], OuterSpec()) for cut in cuts
    ]
    assert torch.equal(torch.cat([part[0] for part in parts]), whole[0])
    assert torch.equal(torch.cat([part[1] for part in parts]), whole[1])
