"""Norms and inner products against plain float64, and which blocks enter the cosines."""

from __future__ import annotations

import pytest
import torch

from tests.volunteer.training.synthetic import encoded, gradient
from volunteer.run import CodecSpec
from volunteer.training.compression import decode, encode
from volunteer.training.similarity import chosen_blocks, gram, norm


def blob_ids(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


@pytest.mark.parametrize("codec_id", ["int4", "int8"])
@pytest.mark.parametrize(("num_elements", "block"), [(5, 16), (100, 17), (1601, 16), (300, 300)])
def test_they_are_those_of_the_decoded_vectors(
    num_elements: int, block: int, codec_id: str
) -> None:
    codec = CodecSpec(id=codec_id, block_elements=block)
    blobs = [encode(gradient(f"v{i}", num_elements, scale=10.0**i), codec) for i in range(4)]
    decoded = [decode(blob).double() for blob in blobs]
    table = gram(blobs, blob_ids(1, 2, 3, 4))
    for i, a_P in enumerate(decoded):
        assert norm(blobs[i]) == pytest.approx(float(a_P.norm()), rel=1e-6)
        if num_elements > 100 * block:
            continue
        for j, b_P in enumerate(decoded):
            size = float(a_P.norm() * b_P.norm())
            assert table[i][j] == pytest.approx(float(a_P @ b_P), abs=1e-6 * size)


def test_a_sample_of_blocks_stands_for_all() -> None:
    block, num_blocks = 17, 150
    blobs = [encoded(gradient(f"s{i}", block * num_blocks - 3), block) for i in range(3)]
    ids = blob_ids(7, 8, 9)
    chosen = chosen_blocks(num_blocks, ids)
    assert len(chosen) == 100
    mask_P = torch.zeros(block * num_blocks, dtype=torch.float64)
    for index in chosen:
        mask_P[index * block : (index + 1) * block] = 1
    mask_P = mask_P[: blobs[0].num_elements]
    decoded = [decode(blob).double() for blob in blobs]
    for i in range(3):
        for j in range(3):
            expected = float((decoded[i] * mask_P) @ decoded[j])
            assert gram(blobs, ids)[i][j] == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_the_choice_is_seeded_sorted_and_large_enough() -> None:
    assert chosen_blocks(100, blob_ids(1)) == list(range(100))
    few, many = chosen_blocks(101, blob_ids(1)), chosen_blocks(50_000, blob_ids(1))
    assert (len(few), len(many)) == (100, 500)
    assert many == sorted(set(many))
    assert many[:6] == [56, 142, 151, 203, 224, 443]  # members must not differ in it
    assert many == chosen_blocks(50_000, blob_ids(1))
    assert many != chosen_blocks(50_000, blob_ids(2))
    assert max(many) < 50_000
    assert max(many) > 49_000


def test_the_order_of_blocks_and_pairs_is_symmetric() -> None:
    blobs = [encoded(gradient(f"sym{i}", 2520)) for i in range(5)]
    table = gram(blobs, blob_ids(*range(5)))
    assert all(table[i][j] == table[j][i] for i in range(5) for j in range(5))


def test_a_zero_vector_has_norm_zero() -> None:
    assert norm(encoded(torch.zeros(100))) == 0.0
