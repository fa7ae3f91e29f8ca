"""Whether numbers are numbers: one bad element is found wherever it lies."""

from __future__ import annotations

import math

import pytest
import torch

from volunteer.training.finite import is_finite


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, 2**18 - 1, 2**18, 2**18 + 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_bad_element_is_found(bad: float, at: int, dtype: torch.dtype) -> None:
    x_P = torch.linspace(-3, 3, 2**18 + 7, dtype=dtype)
    assert is_finite(x_P)
    x_P[at] = bad
    assert not is_finite(x_P)


def test_the_extremes_are_finite_and_so_is_nothing() -> None:
    largest = torch.finfo(torch.float32).max
    assert is_finite(torch.tensor([largest, -largest, 0.0, 1e-45]))
    assert is_finite(torch.empty(0))
