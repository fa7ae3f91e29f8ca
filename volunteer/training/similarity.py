"""Norms and cosines of contributions, exact on every machine.

Runs in: aggregator. Stage 5 of a round. Pure.

A sum of floats depends on its order, and the order on the processor. So what is summed across
elements is integers: codes of a block, at most 65536 * 49 < 2^31. A block's integer is scaled in
fp64, one rounding at a time, and blocks are added by `math.fsum`, which is exact.

Shape legend: C contributions, N blocks, B elements of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from blake3 import blake3
from torch import Tensor

from volunteer.training.compression import EncodedGradient, codes_to, slices

MAX_ALL_BLOCKS = 100
"""Up to this many blocks, every one enters the cosines."""
SAMPLED_FRACTION = 0.01
"""Above, this share of them does (and at least MAX_ALL_BLOCKS). The estimate's error is about
1 / sqrt(100 * block_elements), far below what the rule's threshold asks for."""
_CONTEXT = b"allmende/cosine-blocks/1\x00"


def norm(encoded: EncodedGradient) -> float:
    """Return the Euclidean norm of the decoded vector, over all its blocks."""
    block = encoded.block_elements
    terms: list[float] = []
    for start, stop in slices(encoded.num_elements, block):
        codes_NB = _codes_of(encoded, start, stop)
        integers_N = (codes_NB * codes_NB).sum(1, dtype=torch.int64)
        scales_N = encoded.scales[start // block : start // block + len(codes_NB)].double()
        terms += (integers_N.double() * (scales_N * scales_N)).tolist()
    return math.sqrt(math.fsum(terms))


def gram(blobs: Sequence[EncodedGradient], blob_ids: Sequence[str]) -> list[list[float]]:
    """Return the C x C inner products over the blocks that enter the cosines.

    Args:
        blobs: contributions of one commit, all of one shape.
        blob_ids: their ids in the same order. They seed the choice of blocks, so that nobody knows
            it before having fixed its own blob, which changes it.
    """
    num_blocks = len(blobs[0].scales)
    terms = [_block_products(blobs, i).tolist() for i in chosen_blocks(num_blocks, blob_ids)]
    everyone = range(len(blobs))
    return [[math.fsum(term[i][j] for term in terms) for j in everyone] for i in everyone]


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
    codes_CB = torch.stack([_codes_of_block(blob, block_index) for blob in blobs]).to(torch.int32)
    scales_C = torch.stack([blob.scales[block_index] for blob in blobs]).double()
    scales_CC = scales_C[:, None] * scales_C[None, :]
    return scales_CC * torch.mm(codes_CB, codes_CB.T).double()


def _codes_of_block(encoded: EncodedGradient, block_index: int) -> Tensor:
    """Return the codes of one block as int8, shape (B,), filled up with zeros."""
    start = block_index * encoded.block_elements
    stop = min(start + encoded.block_elements, encoded.num_elements)
    even_start = start - start % 2  # a byte holds two codes
    codes_B = torch.zeros(1 + encoded.block_elements, dtype=torch.int8)
    codes_to(encoded, even_start, stop, out_S=codes_B[: stop - even_start])
    return codes_B[start % 2 :][: encoded.block_elements]


def _codes_of(encoded: EncodedGradient, start: int, stop: int) -> Tensor:
    """Return codes as int8, shape (N, B), the last block filled up with zeros."""
    block = encoded.block_elements
    num_blocks = math.ceil((stop - start) / block)
    codes_S = torch.zeros(num_blocks * block, dtype=torch.int8)
    codes_to(encoded, start, stop, out_S=codes_S[: stop - start])
    return codes_S.view(num_blocks, block)
