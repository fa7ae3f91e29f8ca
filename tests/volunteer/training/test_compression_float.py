"""fp16 and fp32: rounding is IEEE's and stays in the error feedback; hostile values do not pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.volunteer.training.synthetic import gradient
from volunteer.errors import ContributionRejectedError
from volunteer.run import CodecSpec
from volunteer.training.compression import decode, encode
from volunteer.training.compression_base import MAX_MAGNITUDE, MIN_MAGNITUDE
from volunteer.training.compression_float import MAX_MEASURE_CODE, FloatGradient, encode_float
from volunteer.training.similarity import gram, norm

FP16, FP32 = CodecSpec(id="fp16", block_elements=16), CodecSpec(id="fp32", block_elements=16)
MAX_FP16 = 65504.0
vectors = st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=70)


@settings(deadline=None)
@given(vectors)
def test_fp16_is_the_nearest_half_and_widens_exactly(values: list[float]) -> None:
    x_P = torch.tensor(values, dtype=torch.float32)
    blob = encode_float(x_P, FP16)
    expected = x_P.numpy().astype(np.float16).astype(np.float32)
    assert decode(blob).numpy().tobytes() == expected.tobytes()
    error_P = (x_P.double() - decode(blob).double()).abs()
    assert bool((error_P <= torch.clamp(x_P.double().abs() * 2.0**-11, min=2.0**-25)).all())
    blob.verify_bounds()


@settings(deadline=None)
@given(st.lists(st.floats(-4e5, 4e5, width=32, allow_subnormal=False), min_size=1, max_size=70))
def test_fp32_keeps_all(values: list[float]) -> None:
    x_P = torch.tensor(values, dtype=torch.float32)
    blob = encode_float(x_P, FP32)
    assert torch.equal(decode(blob), x_P)
    blob.verify_bounds()


@pytest.mark.parametrize("codec", [FP16, FP32], ids=lambda codec: codec.id)
def test_the_input_is_neither_changed_nor_kept(codec: CodecSpec) -> None:
    x_P = gradient("kept", 40)
    x_P[3] = 1e-40
    before_P = x_P.clone()
    blob = encode_float(x_P, codec)
    assert torch.equal(x_P, before_P)
    assert float(decode(blob)[3]) == 0.0
    x_P.zero_()
    assert bool(decode(blob).any())


@pytest.mark.parametrize("codec", [FP16, FP32], ids=lambda codec: codec.id)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2 * MAX_MAGNITUDE])
def test_what_nobody_would_accept_is_not_encoded(codec: CodecSpec, bad: float) -> None:
    x_P = torch.ones(40)
    x_P[33] = bad
    with pytest.raises(ContributionRejectedError, match="beyond"):
        encode(x_P, codec)


def test_the_largest_values_are_encoded_and_accepted() -> None:
    for codec, largest in ((FP16, MAX_FP16), (FP32, MAX_MAGNITUDE)):
        blob = encode(torch.tensor([largest, -largest]), codec)
        blob.verify_bounds()
        assert decode(blob).tolist() == [largest, -largest]
    with pytest.raises(ContributionRejectedError):
        encode(torch.tensor([65520.0]), FP16)  # would round to infinity


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_halves_that_are_not_finite_are_refused(bad: float) -> None:
    blob = encode_float(gradient("halves", 64), FP16)
    blob.values[63] = bad
    with pytest.raises(ContributionRejectedError, match="not finite"):
        blob.verify_bounds()


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e-45, -MIN_MAGNITUDE / 2, 2 * MAX_MAGNITUDE])
def test_floats_out_of_bounds_are_refused(bad: float) -> None:
    blob = encode_float(gradient("floats", 64), FP32)
    blob.values[0] = bad
    with pytest.raises(ContributionRejectedError, match="bounds"):
        blob.verify_bounds()


def test_zeros_of_both_signs_and_subnormal_halves_pass() -> None:
    for codec in (FP16, FP32):
        encode_float(torch.tensor([0.0, -0.0]), codec).verify_bounds()
    blob = encode_float(torch.tensor([2.0**-24, -(2.0**-20)]), FP16)
    blob.verify_bounds()
    assert decode(blob).tolist() == [2.0**-24, -(2.0**-20)]


@pytest.mark.parametrize("codec_id", ["fp16", "fp32"])
@pytest.mark.parametrize(("num_elements", "block"), [(5, 16), (100, 17), (1601, 16), (300, 300)])
def test_norms_and_products_are_those_of_the_decoded_vectors(
    codec_id: str, num_elements: int, block: int
) -> None:
    codec = CodecSpec(id=codec_id, block_elements=block)
    blobs = [encode(gradient(f"v{i}", num_elements, scale=10.0**i), codec) for i in range(4)]
    decoded = [decode(blob).double() for blob in blobs]
    table = gram(blobs, [f"{number:064x}" for number in range(4)])
    for i, a_P in enumerate(decoded):
        assert norm(blobs[i]) == pytest.approx(float(a_P.norm()), rel=1e-4)
        for j, b_P in enumerate(decoded if num_elements <= 300 else []):
            size = float(a_P.norm() * b_P.norm())
            assert table[i][j] == pytest.approx(float(a_P @ b_P), abs=1e-4 * size)


def hidden(block: int) -> FloatGradient:
    """Return one large element, and all others just too small for a code of their own."""
    x_P = torch.full((block,), 0.499 / MAX_MEASURE_CODE)
    x_P[5] = 1.0
    return encode_float(x_P, CodecSpec(id="fp32", block_elements=block))


def test_little_can_be_hidden_from_the_norm() -> None:
    blob = hidden(4096)
    true_norm = float(decode(blob).double().norm())
    assert norm(blob) == pytest.approx(1.0)
    assert 1.0 < true_norm / norm(blob) < 1.001


def test_the_largest_block_does_not_overflow() -> None:
    block = 65536
    blobs = [encode(torch.full((block,), MAX_FP16), CodecSpec(id="fp16", block_elements=block))] * 2
    expected = MAX_FP16 * math.sqrt(block)
    assert norm(blobs[0]) == pytest.approx(expected, rel=1e-6)
    assert gram(blobs, ["0" * 64, "1" * 64])[0][1] == pytest.approx(expected**2, rel=1e-6)


def test_a_zero_or_tiny_vector_has_norm_zero() -> None:
    for value in (0.0, 2.0**-120):
        assert norm(encode_float(torch.full((40,), value), FP32)) == 0.0
