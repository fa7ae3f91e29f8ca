"""The sparse codec `topk2`, version 1: the largest elements of every block, two bits of each.

Runs in: trainer (encoding), aggregator (decoding). Stages 3 and 5 of a round. Pure.

Of a block of B elements the K largest in magnitude are kept; how many is a function of the round
(`CodecSpec.num_kept`). A kept element is +- one of two magnitudes of its block, `127 * scale` and
`level * scale`: the means of those above and below a threshold in the middle between them. All
others are zero; they stay in the error feedback, as what the two magnitudes lose does.

Paper: arXiv:2508.15706 (SparseLoCo): chunk-wise top-k, 2-bit values, error feedback 0.95.
Differs: a block is 4096 consecutive elements of the flat vector, not 64 x 64 of a matrix; the
magnitudes are the block's own and not a tensor's four bins over six sigma (a half to a thirtieth
of the error on pseudo-gradients, LOGBOOK.md); and indices take 8 bits at 64 of 4096, not 12.

Indices are written down as index_sets.py says: in a fixed number of bits, so that a blob's size is
known before it is fetched.

The last block is filled up with zeros. They are kept only where it has fewer than K elements of its
own: then indices 0..K-1 are, and what lies beyond the vector has no bit set.

Shape legend: P parameters, S a slice of them, N = ceil(P / B) blocks, R blocks of a slice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from volunteer.errors import ContributionRejectedError
from volunteer.run import CodecSpec
from volunteer.training.compression_base import MAX_MAGNITUDE, EncodedGradient, slices
from volunteer.training.compression_block import MIN_SCALE, verify_scales
from volunteer.training.index_sets import (
    Bits,
    Bytes,
    Indices,
    are_sets,
    decode_indices,
    encode_indices,
    pack,
    unpack,
)
from volunteer.training.slice_threads import map_slices, run_slices

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

MAX_CODE = 127
MAX_SCALE = float(MAX_MAGNITUDE // MAX_CODE)
_MAX_BITS = int(np.float32(MAX_MAGNITUDE).view(np.int32))
_FP32_MAGNITUDE = np.int32(0x7FFFFFFF)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopK2Gradient(EncodedGradient):
    """A pseudo-gradient in topk2, on the CPU. Bits lie in bytes from the lowest up."""

    product_dtype: ClassVar[torch.dtype] = torch.int32  # 4096 * 127^2 < 2^31
    measure_dtype: ClassVar[torch.dtype] = torch.int16

    kept_elements: int
    """K, of every block."""
    scales: Tensor
    """A 127th of a block's larger magnitude, fp32, shape (N,); 0 or MIN_SCALE..MAX_SCALE."""
    levels: Tensor
    """Its smaller magnitude over its scale, uint8, shape (N,); 0..127."""
    places: Tensor
    """Where the kept ones are, uint8, whole bytes a block, one bit set for each."""
    offsets: Tensor
    """The low bits of their indices, uint8: for each block and bit, lowest first, K bits."""
    larges: Tensor
    """Which have the larger magnitude, uint8, K bits a block."""
    signs: Tensor
    """Which are negative, uint8, K bits a block."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Scales first, so that they are aligned."""
        return self.scales, self.levels, self.places, self.offsets, self.larges, self.signs

    def decode_slice(self, start: int, stop: int, *, out_S: Tensor) -> None:
        """Decode a slice."""
        places, values = self.kept_slice(start, stop)
        decoded_S = out_S.zero_() if out_S.is_cpu else torch.zeros_like(out_S, device="cpu")
        decoded_S.numpy()[places] = values
        if decoded_S is not out_S:
            out_S.copy_(decoded_S)

    def kept_slice(self, start: int, stop: int) -> tuple[Indices, Floats]:
        """Return the indices, from `start` on, and the values of what is kept of a slice."""
        first, behind = self._blocks(start, stop)
        places_RK = self._indices(first, behind)
        places_RK += np.arange(behind - first)[:, None] * self.block_elements
        values_RK = self._codes(first, behind).astype(np.float32)
        values_RK *= self.scales.numpy()[first:behind, None]
        places, values = places_RK.reshape(-1), values_RK.reshape(-1)
        if stop == self.num_elements:
            are_inside = places < stop - start
            return places[are_inside], values[are_inside]
        return places, values

    def measure_slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the kept ones' codes, shape (N, K), and scales: exactly the content."""
        first, behind = self._blocks(start, stop)
        return torch.from_numpy(self._codes(first, behind)), self.scales[first:behind]

    def measure_block(self, block_index: int) -> tuple[Tensor, Tensor]:
        """Return one block's codes, zeros among them, and scale."""
        codes_B = np.zeros(self.block_elements, dtype=np.int16)
        (indices_K,) = self._indices(block_index, block_index + 1)
        (codes_B[indices_K],) = self._codes(block_index, block_index + 1)
        return torch.from_numpy(codes_B), self.scales[block_index]

    def verify_bounds(self) -> None:
        """Check what a stranger may have put into tensors of the right sizes.

        Raises:
            ContributionRejectedError: a scale that is not 0 or in MIN_SCALE..MAX_SCALE, a level
                above 127, or indices that are not K of the block in the one form.
        """
        verify_scales(self.scales, MAX_SCALE)
        if int(self.levels.amax()) > MAX_CODE:
            raise ContributionRejectedError("the blob has a level above 127")
        run_slices(self._verify_slice, slices(self.num_elements, self.block_elements))

    def _verify_slice(self, start: int, stop: int) -> None:
        first, behind = self._blocks(start, stop)
        places, offsets = self.places.numpy(), self.offsets.numpy()
        if not are_sets(
            places, offsets, self.kept_elements, self.block_elements, first=first, behind=behind
        ):
            raise ContributionRejectedError(
                "the blob keeps too many or too few of a block, or its indices are out of order"
            )
        if stop == self.num_elements:
            self._verify_last_block(behind - 1)

    def _verify_last_block(self, index: int) -> None:
        num_own = self.num_elements - index * self.block_elements
        (indices_K,) = self._indices(index, index + 1)
        (are_large_K,) = unpack(self.larges.numpy(), index, index + 1, self.kept_elements)
        (are_negative_K,) = unpack(self.signs.numpy(), index, index + 1, self.kept_elements)
        are_beyond_K = indices_K >= num_own
        if num_own >= self.kept_elements:
            is_in_form = not bool(are_beyond_K.any())
        else:
            is_in_form = int(indices_K[-1]) == self.kept_elements - 1 and not bool(
                ((are_large_K | are_negative_K) & are_beyond_K).any()
            )
        if not is_in_form:
            raise ContributionRejectedError("the blob keeps what lies beyond the vector")

    def _blocks(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first block of a slice, and the one behind its last."""
        return start // self.block_elements, -(-stop // self.block_elements)

    def _indices(self, first: int, behind: int) -> Indices:
        """Return the indices in their blocks, int64, shape (R, K), of blocks first..behind."""
        places, offsets = self.places.numpy(), self.offsets.numpy()
        return decode_indices(
            places, offsets, self.kept_elements, self.block_elements, first=first, behind=behind
        )

    def _codes(self, first: int, behind: int) -> npt.NDArray[np.int16]:
        """Return the codes -127..127, shape (R, K), of blocks first..behind."""
        are_large_RK = unpack(self.larges.numpy(), first, behind, self.kept_elements)
        are_negative_RK = unpack(self.signs.numpy(), first, behind, self.kept_elements)
        levels_R = self.levels.numpy()[first:behind].astype(np.int16)
        codes_RK = np.where(are_large_RK, np.int16(MAX_CODE), levels_R[:, None])
        return np.negative(codes_RK, out=codes_RK, where=are_negative_RK)


def encode_topk2(x_P: Tensor, codec: CodecSpec, round_index: int) -> TopK2Gradient:
    """Compress `x_P` (arguments and errors: `compression.encode`); the result is on the CPU."""
    block, kept = codec.block_elements, codec.num_kept(round_index)

    def encode_slice(start: int, stop: int) -> tuple[npt.NDArray[np.generic], ...]:
        x_S = x_P[start:stop].to(device="cpu", dtype=torch.float32).numpy()
        return _encode_blocks(x_S, block, kept)

    # Each slice's parts are a fraction of the slice; joined, they are the blob.
    parts = list(map_slices(encode_slice, slices(x_P.numel(), block)))
    scales, levels, places, offsets, larges, signs = (
        torch.from_numpy(np.concatenate(column)) for column in zip(*parts, strict=True)
    )
    return TopK2Gradient(
        num_elements=x_P.numel(),
        block_elements=block,
        kept_elements=kept,
        scales=scales,
        levels=levels,
        places=places,
        offsets=offsets,
        larges=larges,
        signs=signs,
    )


def _encode_blocks(x_S: Floats, block: int, kept: int) -> tuple[npt.NDArray[np.generic], ...]:
    """Return a slice's part of each tensor, in the order of `TopK2Gradient.tensors`."""
    num_blocks = math.ceil(len(x_S) / block)
    x_RB = np.pad(x_S, (0, num_blocks * block - len(x_S))).reshape(num_blocks, block)
    magnitudes_RB = x_RB.view(np.int32) & _FP32_MAGNITUDE  # ordered as the magnitudes are
    if int(magnitudes_RB.max()) > _MAX_BITS:
        raise ContributionRejectedError(
            "the pseudo-gradient has elements that are not finite or beyond the codec's range"
        )
    if num_blocks * block > len(x_S):
        # Zeros beyond the vector rank behind all others, the last ones last.
        beyond = np.arange(num_blocks * block - len(x_S), dtype=np.int32)
        magnitudes_RB.reshape(-1)[len(x_S) :] = -1 - beyond
    is_kept_RB = _largest(magnitudes_RB, kept)
    indices_RK = np.flatnonzero(is_kept_RB).reshape(num_blocks, kept)
    values_RK = x_RB.reshape(-1)[indices_RK]
    indices_RK -= np.arange(num_blocks)[:, None] * block
    scales_R, levels_R, is_large_RK = _two_magnitudes(np.abs(values_RK))
    places, offsets = encode_indices(indices_RK, block)
    return scales_R, levels_R, places, offsets, pack(is_large_RK), pack(values_RK < 0)


def _largest(magnitudes_RB: npt.NDArray[np.int32], kept: int) -> Bits:
    """Mark `kept` of the largest in each row; among equals, the first."""
    block = magnitudes_RB.shape[1]
    smallest_R1 = np.partition(magnitudes_RB, block - kept, axis=1)[:, block - kept, None]
    is_kept_RB = magnitudes_RB >= smallest_R1
    surplus_R = np.count_nonzero(is_kept_RB, axis=1) - kept
    for row in np.flatnonzero(surplus_R):
        equals = np.flatnonzero(magnitudes_RB[row] == smallest_R1[row])
        is_kept_RB[row, equals[len(equals) - surplus_R[row] :]] = False
    return is_kept_RB


def _two_magnitudes(sizes_RK: Floats) -> tuple[Floats, Bytes, Bits]:
    """Return scales, levels, and which are large: two means, and the middle between them.

    Two steps of Lloyd's method from the mean of all; more of them gain nothing (LOGBOOK.md). Where
    zeros had to be kept, they stay zeros: they are the small ones, and all others large.
    """
    sizes = sizes_RK.astype(np.float64)
    total_R1 = sizes.sum(axis=1, keepdims=True)
    threshold_R1 = total_R1 / sizes.shape[1]
    for _ in range(2):
        is_large_RK = sizes > threshold_R1
        low_R1, high_R1 = _means(sizes, is_large_RK, total_R1)
        threshold_R1 = (low_R1 + high_R1) / 2
    has_zero_R1 = sizes.min(axis=1, keepdims=True) == 0
    if bool(has_zero_R1.any()):
        is_large_RK = np.where(has_zero_R1, sizes > 0, is_large_RK)
        low_R1, high_R1 = _means(sizes, is_large_RK, total_R1)
    scales_R = (high_R1[:, 0] / MAX_CODE).astype(np.float32)
    scales_R[scales_R < MIN_SCALE] = 0.0
    divisors_R1 = np.where(scales_R == 0, np.inf, scales_R)[:, None]
    levels_R = np.clip(np.rint(low_R1 / divisors_R1), 0, MAX_CODE)
    return scales_R, levels_R[:, 0].astype(np.uint8), is_large_RK


def _means(sizes: Doubles, is_large_RK: Bits, total_R1: Doubles) -> tuple[Doubles, Doubles]:
    """Return the means of the small and of the large, shape (R, 1) each."""
    num_large_R1 = np.count_nonzero(is_large_RK, axis=1)[:, None]
    num_small_R1 = sizes.shape[1] - num_large_R1
    large_R1 = np.where(is_large_RK, sizes, 0.0).sum(axis=1, keepdims=True)
    # A difference of sums, rounded: of nothing, or of zeros, it need not be 0.
    low_R1 = np.maximum((total_R1 - large_R1) / np.maximum(num_small_R1, 1), 0.0)
    high_R1 = np.where(num_large_R1 > 0, large_R1 / np.maximum(num_large_R1, 1), low_R1)
    return low_R1, high_R1
