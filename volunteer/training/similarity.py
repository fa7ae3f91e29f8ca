"""Norms and cosines of contributions, exact on every machine.

Runs in: aggregator. Stage 5 of a round. Pure.

A sum of floats depends on its order, and the order on the processor. So what is summed across
elements is integers: products of a block's codes, which each codec says how to get. A block's
integer is scaled in fp64, one rounding at a time, and blocks are added by `math.fsum`, which is
exact.

Shape legend: C contributions, N blocks, B elements of a block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor

from volunteer.training.compression import EncodedGradient, slices
from volunteer.training.slice_threads import map_slices

MAX_ALL_BLOCKS = 100
"""Up to this many blocks, every one enters the cosines."""
SAMPLED_FRACTION = 0.01
"""Above, this share of them does (and at least MAX_ALL_BLOCKS). The estimate's error is about
1 / sqrt(100 * block_elements), far below what the rule's threshold asks for."""
_CONTEXT = b"allmende/cosine-blocks/1\x00"


def norm(encoded: EncodedGradient) -> float:
    """Return the Euclidean norm of the decoded vector, over all its blocks."""

    def terms(start: int, stop: int) -> list[float]:
        codes_NB, scales_N = encoded.measure_slice(start, stop)
        integers_N = (codes_NB * codes_NB).sum(1, dtype=torch.int64)
        scales_N = scales_N.double()
        return (integers_N.double() * (scales_N * scales_N)).tolist()

    parts = map_slices(terms, slices(encoded.num_elements, encoded.block_elements))
    return math.sqrt(math.fsum(itertools.chain.from_iterable(parts)))


def gram(blobs: Sequence[EncodedGradient], blob_ids: Sequence[str]) -> list[list[float]]:
    """Return the C x C inner products over the blocks that enter the cosines.

    Args:
        blobs: contributions of one commit, all of one shape.
        blob_ids: their ids in the same order. They seed the choice of blocks, so that nobody knows
            it before having fixed its own blob, which changes it.
    """
    num_blocks = math.ceil(blobs[0].num_elements / blobs[0].block_elements)
    terms = [_block_products(blobs, i).tolist() for i in chosen_blocks(num_blocks, blob_ids)]
    everyone = range(len(blobs))
    return [[math.fsum(term[i][j] for term in terms) for j in everyone] for i in everyone]


def sampled_elements(num_elements: int, block_elements: int, blob_ids: Sequence[str]) -> int:
    """Return how many elements the blocks that enter the cosines hold."""
    num_blocks = math.ceil(num_elements / block_elements)
    chosen = chosen_blocks(num_blocks, blob_ids)
    missing = num_blocks * block_elements - num_elements  # of the last block
    return len(chosen) * block_elements - (missing if chosen[-1] == num_blocks - 1 else 0)


def chosen_blocks(num_blocks: int, blob_ids: Sequence[str]) -> list[int]:
    """Return the sorted indices of the blocks that enter the cosines: a seeded draw, or all."""
    if num_blocks <= MAX_ALL_BLOCKS:
        return list(range(num_blocks))
    num_chosen = max(MAX_ALL_BLOCKS, int(num_blocks * SAMPLED_FRACTION))
    hasher = blake3(_CONTEXT + "".join(blob_ids).encode())
    chosen: set[int] = set()
    draw_index = 0
    while len(chosen) < num_chosen:
        draw = hasher.digest(length=8, seek=8 * draw_index)
        chosen.add(int.from_bytes(draw, "little") % num_blocks)
        draw_index += 1
    return sorted(chosen)


def _block_products(blobs: Sequence[EncodedGradient], block_index: int) -> Tensor:
    """Return the inner products within one block, fp64, shape (C, C)."""
    measured = [blob.measure_block(block_index) for blob in blobs]
    codes_CB = torch.stack([codes_B for codes_B, _ in measured]).to(blobs[0].product_dtype)
    scales_C = torch.stack([scale for _, scale in measured]).double()
    scales_CC = scales_C[:, None] * scales_C[None, :]
    return scales_CC * torch.mm(codes_CB, codes_CB.T).double()
