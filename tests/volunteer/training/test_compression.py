"""int4, int8: what is lost is bounded, stays in the error feedback; hostile values do not pass."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.volunteer.training.synthetic import encoded, gradient
from volunteer.errors import ContributionRejectedError
from volunteer.run import CodecSpec
from volunteer.training import compression_int4, compression_int8
from volunteer.training.compression import decode, encode, slices
from volunteer.training.compression_block import MIN_SCALE, BlockGradient
from volunteer.training.compression_int4 import MAX_SCALE
from volunteer.training.pseudo_gradient import RunCodec, contribute, rebase

floats = st.floats(-1000, 1000, width=32)
vectors = st.lists(floats, min_size=1, max_size=70)
block_sizes = st.sampled_from([16, 17, 31, 64])
MAX_CODES = {"int4": compression_int4.MAX_CODE, "int8": compression_int8.MAX_CODE}


def block_gradient(x_P: torch.Tensor, codec_id: str, block: int = 16) -> BlockGradient:
    blob = encode(x_P, CodecSpec(id=codec_id, block_elements=block))
    assert isinstance(blob, BlockGradient)
    return blob


def scales_by_element(blob: BlockGradient) -> torch.Tensor:
    return blob.scales.repeat_interleave(blob.block_elements)[: blob.num_elements]


@pytest.mark.parametrize("codec_id", MAX_CODES)
@settings(deadline=None)
@given(vectors, block_sizes)
def test_the_error_is_at_most_half_a_scale(codec_id: str, values: list[float], block: int) -> None:
    x_P = torch.tensor(values, dtype=torch.float32)
    blob = block_gradient(x_P, codec_id, block)
    error_P = (x_P.double() - decode(blob).double()).abs()
    # code * scale and x / scale are rounded, by 2^-24 of the whole each.
    relative = 0.5 + MAX_CODES[codec_id] * 2.0**-22
    bound_P = scales_by_element(blob).double() * relative + MAX_CODES[codec_id] * MIN_SCALE
    assert bool((error_P <= bound_P).all())
    blob.verify_bounds()


@pytest.mark.slow
@pytest.mark.parametrize("codec_id", ["int4", "int8", "fp16", "fp32"])
@settings(deadline=None)
@given(st.lists(vectors, min_size=1, max_size=8), block_sizes)
def test_what_was_sent_and_what_is_left_add_up(
    codec_id: str, rounds: list[list[float]], block: int
) -> None:
    num_elements = max(len(values) for values in rounds)
    theta_P = torch.zeros(num_elements, dtype=torch.float64)
    base_P, residual_P, sent_P = theta_P.clone(), theta_P.clone(), theta_P.clone()
    trained_P = theta_P.clone()
    for values in rounds:
        step_P = torch.zeros_like(theta_P)
        step_P[: len(values)] = torch.tensor(values, dtype=torch.float64)
        theta_P = theta_P - step_P
        trained_P += step_P
        result = contribute(
            theta_P, base_P, residual_P, RunCodec(CodecSpec(id=codec_id, block_elements=block), 0)
        )
        base_P, residual_P = theta_P, result.residual_P
        sent_P += result.quantised_P
    torch.testing.assert_close(sent_P + residual_P, trained_P, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("num_elements", [1, 2, 15, 16, 17, 33, 2**18 + 5, 2**19 + 16])
@pytest.mark.parametrize("block", [16, 17])
@pytest.mark.parametrize("codec_id", MAX_CODES)
def test_slices_do_not_change_the_result(num_elements: int, block: int, codec_id: str) -> None:
    x_P = gradient(f"slices-{num_elements}", num_elements)
    blob = block_gradient(x_P, codec_id, block)
    decoded_P = decode(blob)
    padded = torch.nn.functional.pad(x_P, (0, -num_elements % block)).view(-1, block)
    scales_N = padded.abs().amax(1) / MAX_CODES[codec_id]
    codes = (padded / scales_N[:, None]).nan_to_num().round()
    expected_P = (codes * scales_N[:, None]).view(-1)[:num_elements]
    assert torch.equal(decoded_P, expected_P)


def test_slices_cover_everything_once() -> None:
    for num_elements, block in ((1, 16), (2**18, 4096), (2**18 + 1, 17), (10**6, 65536)):
        cuts = list(slices(num_elements, block))
        assert cuts[0][0] == 0
        assert cuts[-1][1] == num_elements
        assert all(a[1] == b[0] for a, b in itertools.pairwise(cuts))
        assert all(start % block == 0 and start % 2 == 0 for start, _ in cuts)


@pytest.mark.parametrize("codec_id", MAX_CODES)
def test_zero_and_subnormal_blocks_become_zero_and_stay_in_the_error_feedback(
    codec_id: str,
) -> None:
    x_P = torch.zeros(48)
    x_P[20] = 1e-40
    x_P[40] = 1.0
    blob = block_gradient(x_P, codec_id)
    assert blob.scales.tolist()[:2] == [0.0, 0.0]
    assert torch.equal(decode(blob)[:32], torch.zeros(32))
    assert float(decode(blob)[40]) == pytest.approx(1.0)
    blob.verify_bounds()


@pytest.mark.parametrize("codec_id", MAX_CODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 8 * MAX_SCALE])
def test_what_nobody_would_accept_is_not_encoded(bad: float, codec_id: str) -> None:
    x_P = torch.ones(40)
    x_P[33] = bad
    with pytest.raises(ContributionRejectedError):
        block_gradient(x_P, codec_id)


def test_the_largest_value_is_kept_and_its_sign_too() -> None:
    x_P = torch.tensor([0.7, -0.7, 0.06, -0.06] * 4)
    assert decode(encoded(x_P)).tolist() == pytest.approx([0.7, -0.7, 0.1, -0.1] * 4, abs=0.06)
    assert decode(encoded(x_P))[1] == -decode(encoded(x_P))[0]


@pytest.mark.parametrize("codec_id", MAX_CODES)
@pytest.mark.parametrize("bad", [-0.0, -1.0, 1e-45, MIN_SCALE / 2, 2 * MAX_SCALE, float("nan")])
def test_scales_out_of_bounds_are_refused(bad: float, codec_id: str) -> None:
    blob = block_gradient(gradient("scales", 64), codec_id)
    blob.scales[2] = bad
    with pytest.raises(ContributionRejectedError, match="scale"):
        blob.verify_bounds()


@pytest.mark.parametrize("bad", [0x00, 0x0F, 0xF0, 0x80, 0x08])
def test_code_minus_eight_is_refused(bad: int) -> None:
    blob = encoded(gradient("codes", 64))
    blob.codes[-1] = bad
    with pytest.raises(ContributionRejectedError, match="code"):
        blob.verify_bounds()


def test_code_minus_128_is_refused() -> None:
    blob = block_gradient(gradient("codes", 64), "int8")
    blob.verify_bounds()
    blob.codes[-1] = -128
    with pytest.raises(ContributionRejectedError, match="code"):
        blob.verify_bounds()


def test_the_largest_scale_of_int8_is_accepted_and_no_larger_one() -> None:
    largest = compression_int8.MAX_SCALE * 127
    block_gradient(torch.full((16,), largest), "int8").verify_bounds()
    with pytest.raises(ContributionRejectedError):
        block_gradient(torch.full((16,), 1.001 * largest), "int8")


def test_padding_has_one_form() -> None:
    blob = encoded(gradient("padding", 33))
    blob.codes[-1] = (int(blob.codes[-1]) & 0x0F) | 0x90
    with pytest.raises(ContributionRejectedError, match="padding"):
        blob.verify_bounds()


def test_rebasing_keeps_the_displacement() -> None:
    theta_P, base_P = torch.tensor([1.0, 2.0]), torch.tensor([0.5, 3.0])
    moved_P, new_base_P = rebase(theta_P, base_P, torch.tensor([10.0, 20.0]))
    assert moved_P.tolist() == [10.5, 19.0]
    assert new_base_P.tolist() == [10.0, 20.0]
    assert theta_P.tolist() == [1.0, 2.0]


def test_the_pseudo_gradient_descends_and_beta_scales_what_was_left() -> None:
    codec = RunCodec(CodecSpec(error_feedback_beta=0.5), 0)
    base_P = torch.full((16,), 3.0)
    theta_P = torch.full((16,), 2.0)
    result = contribute(theta_P, base_P, torch.full((16,), 4.0), codec)
    assert result.quantised_P.tolist() == pytest.approx([3.0] * 16)  # (3 - 2) + 0.5 * 4
