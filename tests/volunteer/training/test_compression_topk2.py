"""topk2: the largest of each block, in one form; what they lose stays; hostile bits do not pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.volunteer.training.synthetic import gradient, make_codec
from volunteer.errors import ContributionRejectedError
from volunteer.run import CodecSpec, index_bits
from volunteer.training.compression import decode, encode, from_tensors, subtract_decoded
from volunteer.training.compression_block import MIN_SCALE
from volunteer.training.compression_topk2 import MAX_SCALE, TopK2Gradient
from volunteer.training.pseudo_gradient import RunCodec, contribute
from volunteer.training.similarity import gram, norm

LADDERS = [(64, 32), (64, 16), (64, 8), (128, 8), (256, 16), (64, 64)]
"""Block and kept elements: bitmaps, and indices with 2 to 4 stored bits."""
vectors = st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=300)


def codec(block: int, kept: int) -> CodecSpec:
    return CodecSpec(id="topk2", block_elements=block, ladder_kept=(kept,), ladder_rounds=(0,))


def topk(x_P: Tensor, block: int = 64, kept: int = 8) -> TopK2Gradient:
    blob = encode(x_P, codec(block, kept))
    assert isinstance(blob, TopK2Gradient)
    return blob


def in_blocks(x_P: Tensor, block: int) -> Tensor:
    return torch.nn.functional.pad(x_P, (0, -len(x_P) % block)).view(-1, block)


@pytest.mark.parametrize(("block", "kept"), LADDERS)
@settings(deadline=None, max_examples=40)
@given(vectors)
def test_the_largest_are_kept_and_lie_between_their_two_magnitudes(
    block: int, kept: int, values: list[float]
) -> None:
    x_P = torch.tensor(values, dtype=torch.float32)
    blob = topk(x_P, block, kept)
    blob.verify_bounds()
    for x_B, y_B in zip(in_blocks(x_P, block), in_blocks(decode(blob), block), strict=True):
        sizes = x_B.abs().sort(descending=True).values
        sent = y_B != 0
        assert int(sent.sum()) <= kept
        assert bool((x_B.abs()[sent] >= sizes[kept - 1]).all())
        assert torch.equal(torch.sign(y_B[sent]), torch.sign(x_B[sent]))
        # A value's nearer magnitude is off by at most the spread of what is kept, but for rounding.
        spread = float(sizes[0] - sizes[kept - 1])
        error = (x_B - y_B)[sent].abs()
        assert bool((error <= spread + float(sizes[0]) / 127).all())


@pytest.mark.parametrize(("block", "kept"), LADDERS)
def test_what_is_dropped_is_what_the_paper_drops(block: int, kept: int) -> None:
    """Against torch's own top-k; the values' two bits lose a sixth of what they carry at most."""
    x_P = gradient(f"topk {block} {kept}", 20 * block - 3) ** 3
    x_NB = in_blocks(x_P, block)
    best = float(x_NB.abs().topk(kept, 1).values.square().sum())
    error = float((x_P - decode(topk(x_P, block, kept))).square().sum())
    total = float(x_P.square().sum())
    assert total - best <= error + 1e-12 * total
    assert error <= total - 5 / 6 * best


@pytest.mark.parametrize(("block", "kept"), LADDERS)
@settings(deadline=None, max_examples=20)
@given(st.lists(vectors, min_size=1, max_size=6))
def test_what_was_sent_and_what_is_left_add_up(
    block: int, kept: int, rounds: list[list[float]]
) -> None:
    num_elements = max(map(len, rounds))
    theta_P = torch.zeros(num_elements, dtype=torch.float64)
    residual_P, sent_P, trained_P = theta_P.clone(), theta_P.clone(), theta_P.clone()
    for values in rounds:
        step_P = torch.zeros_like(theta_P)
        step_P[: len(values)] = torch.tensor(values, dtype=torch.float64)
        trained_P += step_P
        result = contribute(theta_P - step_P, theta_P, residual_P, RunCodec(codec(block, kept), 0))
        theta_P, residual_P = theta_P - step_P, result.residual_P
        sent_P += result.quantised_P
    torch.testing.assert_close(sent_P + residual_P, trained_P, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("num_elements", [1, 7, 8, 9, 63, 64, 65, 128, 2**18 + 5, 2**19 + 64])
def test_slices_and_the_last_block_do_not_change_the_result(num_elements: int) -> None:
    x_P = gradient(f"slices {num_elements}", num_elements)
    blob = topk(x_P)
    blob.verify_bounds()
    whole_P = decode(blob)
    assert len(whole_P) == num_elements
    last = num_elements - num_elements % 64
    alone_P = decode(topk(x_P[last:])) if last < num_elements else torch.zeros(0)
    assert torch.equal(whole_P[last:], alone_P)
    left_P = x_P.clone()
    subtract_decoded(blob, left_P)
    assert torch.equal(left_P, x_P - whole_P)


def test_threads_do_not_change_the_result() -> None:
    x_P = gradient("threads", 5 * 2**18 + 77)
    before = torch.get_num_threads()
    try:
        seen = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            blob = topk(x_P, 4096, 64)
            blob.verify_bounds()
            seen.append(b"".join(tensor.numpy().tobytes() for tensor in blob.tensors))
            assert torch.get_num_threads() == num_threads
        assert len(set(seen)) == 1
    finally:
        torch.set_num_threads(before)


def test_a_block_of_zeros_or_of_equals_is_one_of_the_valid_forms() -> None:
    x_P = torch.zeros(200)
    x_P[64:128] = -3.0
    x_P[130] = 1e-40
    blob = topk(x_P)
    blob.verify_bounds()
    assert blob.scales.tolist()[0] == blob.scales.tolist()[2] == 0.0
    decoded_P = decode(blob)
    assert decoded_P[64:72].tolist() == pytest.approx([-3.0] * 8)  # among equals, the first
    assert int((decoded_P != 0).sum()) == 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e6])
def test_what_nobody_would_accept_is_not_encoded(bad: float) -> None:
    x_P = torch.ones(100)
    x_P[70] = bad
    with pytest.raises(ContributionRejectedError, match="beyond"):
        topk(x_P)


def test_at_the_end_of_the_ladder_a_contribution_takes_a_192th_of_fp32() -> None:
    spec = CodecSpec(id="topk2")
    assert [spec.num_kept(r) for r in (0, 99, 100, 199, 200, 10**6)] == [
        *(1024, 1024, 256, 256, 64, 64)
    ]
    assert 4 / codec(4096, 64).bytes_per_parameter == pytest.approx(192.8, abs=0.1)
    assert spec.bytes_per_parameter == codec(4096, 1024).bytes_per_parameter


def test_an_index_set_is_as_short_as_elias_and_fano_say() -> None:
    assert index_bits(64, 4096) == (6, 128)  # 8 bits an index; plainly packed 12
    assert index_bits(256, 4096) == (4, 512)
    assert index_bits(1024, 4096) == (0, 4096)
    for block, kept in LADDERS:
        offset_bits, place_bits = index_bits(kept, block)
        bound = math.log2(math.comb(block, kept)) if kept < block else 0.0
        assert bound <= place_bits + offset_bits * kept <= max(block, bound + 2 * kept)


@pytest.mark.parametrize(("num_elements", "block"), [(5, 64), (100, 64), (1601, 256), (300, 128)])
def test_norms_and_products_are_those_of_the_decoded_vectors(num_elements: int, block: int) -> None:
    blobs = [topk(gradient(f"v{i}", num_elements, scale=10.0**i), block, 16) for i in range(4)]
    decoded = [decode(blob).double() for blob in blobs]
    table = gram(blobs, [f"{number:064x}" for number in range(4)])
    for i, a_P in enumerate(decoded):
        assert norm(blobs[i]) == pytest.approx(float(a_P.norm()), rel=1e-6)
        for j, b_P in enumerate(decoded):
            size = float(a_P.norm() * b_P.norm())
            assert table[i][j] == pytest.approx(float(a_P @ b_P), abs=1e-6 * size)


def changed(blob: TopK2Gradient, name: str, change: Callable[[Tensor], None]) -> TopK2Gradient:
    tensor = getattr(blob, name).clone()
    change(tensor)
    return dataclasses.replace(blob, **{name: tensor})


def assign(index: int, value: float) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        tensor[index] = value

    return change


@pytest.mark.parametrize("bad", [-0.0, -1.0, 1e-45, MIN_SCALE / 2, 2 * MAX_SCALE, math.nan])
def test_scales_out_of_bounds_are_refused(bad: float) -> None:
    blob = topk(gradient("scales", 200))
    with pytest.raises(ContributionRejectedError, match="scale"):
        changed(blob, "scales", assign(2, bad)).verify_bounds()


def test_a_level_above_the_larger_magnitude_is_refused() -> None:
    blob = topk(gradient("levels", 200))
    changed(blob, "levels", assign(1, 127)).verify_bounds()
    with pytest.raises(ContributionRejectedError, match="level"):
        changed(blob, "levels", assign(1, 128)).verify_bounds()


@pytest.mark.parametrize(("block", "kept"), LADDERS)
def test_too_many_or_too_few_indices_are_refused(block: int, kept: int) -> None:
    blob = topk(gradient("indices", 3 * block), block, kept)
    row_bytes = index_bits(kept, block)[1] // 8
    for value in (0, 0xFF):
        if int(blob.places[row_bytes]) == value:
            continue
        with pytest.raises(ContributionRejectedError, match="too many or too few"):
            changed(blob, "places", assign(row_bytes, value)).verify_bounds()


def hand_made(indices: list[int], num_elements: int = 64) -> TopK2Gradient:
    """Return one block of 64 with 8 kept, its indices written down as they are given."""
    places, offsets = np.zeros(16, dtype=np.uint8), np.zeros((3, 8), dtype=np.uint8)
    for rank, index in enumerate(indices):
        places[(index >> 3) + rank] = 1
        offsets[:, rank] = [(index >> bit) & 1 for bit in range(3)]
    packed = [np.packbits(bits, bitorder="little") for bits in (places, offsets.reshape(-1))]
    return TopK2Gradient(
        num_elements=num_elements,
        block_elements=64,
        kept_elements=8,
        scales=torch.ones(1),
        levels=torch.full((1,), 5, dtype=torch.uint8),
        places=torch.from_numpy(packed[0]),
        offsets=torch.from_numpy(packed[1]),
        larges=torch.zeros(1, dtype=torch.uint8),
        signs=torch.zeros(1, dtype=torch.uint8),
    )


def test_indices_rise_and_stay_in_the_block() -> None:
    good = [0, 1, 7, 8, 30, 31, 62, 63]
    blob = hand_made(good)
    blob.verify_bounds()
    assert torch.nonzero(decode(blob)).view(-1).tolist() == good
    for bad in ([0, 1, 7, 7, 30, 31, 62, 63], [0, 2, 1, 8, 30, 31, 62, 63], [*good[:-1], 64]):
        with pytest.raises(ContributionRejectedError, match="order"):
            hand_made(bad).verify_bounds()


def test_nothing_beyond_the_vector_is_kept_while_there_is_something_in_it() -> None:
    hand_made([0, 1, 2, 3, 4, 5, 6, 8], num_elements=9).verify_bounds()
    with pytest.raises(ContributionRejectedError, match="beyond"):
        hand_made([0, 1, 2, 3, 4, 5, 6, 9], num_elements=9).verify_bounds()


def test_a_short_last_block_keeps_all_of_it_in_one_form() -> None:
    short = hand_made(list(range(8)), num_elements=5)
    short.verify_bounds()
    assert decode(short).tolist() == [5.0] * 5
    with pytest.raises(ContributionRejectedError, match="beyond"):
        hand_made([0, 1, 2, 3, 4, 5, 6, 8], num_elements=5).verify_bounds()
    for name in ("larges", "signs"):
        changed(short, name, assign(0, 0x1F)).verify_bounds()
        with pytest.raises(ContributionRejectedError, match="beyond"):
            changed(short, name, assign(0, 0x20)).verify_bounds()


@pytest.mark.parametrize(("block", "kept"), LADDERS)
@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_bits_are_refused_or_decode_to_what_is_valid(
    block: int, kept: int, data: st.DataObject
) -> None:
    """Only ContributionRejectedError escapes, and what passes is finite and within its bounds."""
    num_elements = data.draw(st.integers(1, 3 * block))
    blob = topk(gradient(f"fuzz {num_elements}", num_elements), block, kept)
    tensors = [tensor.clone() for tensor in blob.tensors]
    for tensor in tensors:
        raw = tensor.view(torch.uint8)
        for _ in range(data.draw(st.integers(0, 2))):
            if len(raw):
                raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    hostile = from_tensors(tuple(tensors), codec(block, kept), num_elements, 0)
    try:
        hostile.verify_bounds()
    except ContributionRejectedError:
        return
    decoded_P = decode(hostile)
    assert bool((decoded_P.abs() <= 127 * MAX_SCALE).all())
    assert bool((in_blocks(decoded_P, block) != 0).sum(1).max() <= kept)
    assert math.isfinite(norm(hostile))


def test_the_ladder_is_climbed_with_the_rounds() -> None:
    spec = make_codec("topk2")
    sizes = [encode(gradient("ladder", 2520), spec, r).tensors[5].numel() * 8 for r in range(4)]
    assert [size // 10 for size in sizes] == [64, 16, 8, 8]
