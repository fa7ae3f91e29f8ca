"""The dense codecs `fp16` and `fp32`, version 1: the values themselves, two or four bytes each.

Runs in: trainer (encoding), aggregator (decoding). Stages 3 and 5 of a round. Pure.

An element is IEEE 754 binary16 or binary32, little-endian, rounded to nearest even. Decoding widens
to fp32, which is exact. What rounding loses (fp16: half a unit in the last of 11 bits, and below
2^-14 half of 2^-24; fp32: what is below 2^-126) stays in the error feedback, as with int4.

Norms and cosines are exact sums of integers. A float is none, so a block is measured by codes
-32767..32767 of its own, amax / 32767 apart: elementwise division and rounding, the same on every
machine. The measured norm of a block of B elements is off by at most sqrt(B) / 65534 of its largest
element, which is below 0.1 % of the block's norm for B = 4096.

Shape legend: P parameters, S a slice of them, N blocks, B elements of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from volunteer.errors import ContributionRejectedError
from volunteer.run import CodecSpec
from volunteer.training.compression_base import (
    MAX_MAGNITUDE,
    MIN_MAGNITUDE,
    EncodedGradient,
    slices,
)
from volunteer.training.slice_threads import run_slices

FLOAT_DTYPES = {"fp16": torch.float16, "fp32": torch.float32}
MAX_MEASURE_CODE = 2**15 - 1
MIN_MEASURED = 2.0**-110
"""A block whose largest element is smaller is measured as zero: its scale would be subnormal."""
_FP16_MAGNITUDE = 0x7FFF
_FP16_INFINITY = 0x7C00  # above it are the not-a-numbers
_FP32_MAGNITUDE = 0x7FFFFFFF
_MIN_BITS = int(np.float32(MIN_MAGNITUDE).view(np.int32))
_MAX_BITS = int(np.float32(MAX_MAGNITUDE).view(np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FloatGradient(EncodedGradient):
    """A pseudo-gradient in fp16 or fp32."""

    product_dtype: ClassVar[torch.dtype] = torch.int64  # 65536 * 2^30 > 2^31
    measure_dtype: ClassVar[torch.dtype] = torch.int32

    values: Tensor
    """float16 or float32, shape (P,); finite, in fp32 at most MAX_MAGNITUDE and never subnormal."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The values alone."""
        return (self.values,)

    def decode_slice(self, start: int, stop: int, *, out_S: Tensor) -> None:
        """Widen a slice."""
        out_S.copy_(self.values[start:stop])

    def measure_slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return codes (int32) and scales that stand for the slice's blocks."""
        num_blocks = math.ceil((stop - start) / self.block_elements)
        x_S = torch.zeros(num_blocks * self.block_elements, dtype=torch.float32)
        x_S[: stop - start] = self.values[start:stop]
        return _measure(x_S.view(num_blocks, self.block_elements))

    def measure_block(self, block_index: int) -> tuple[Tensor, Tensor]:
        """Return codes (int32) and scale that stand for one block."""
        start = block_index * self.block_elements
        stop = min(start + self.block_elements, self.num_elements)
        codes_1B, scales_1 = self.measure_slice(start, stop)
        return codes_1B[0], scales_1[0]

    def verify_bounds(self) -> None:
        """Check the values, by their bit patterns.

        Raises:
            ContributionRejectedError: a value that is not finite or, in fp32, subnormal or larger
                than MAX_MAGNITUDE.
        """
        run_slices(self._verify_values, slices(self.num_elements, self.block_elements))

    def _verify_values(self, start: int, stop: int) -> None:
        if not _are_valid(self.values[start:stop]):
            raise ContributionRejectedError(
                "the blob has a value that is not finite or out of bounds"
            )


def _are_valid(values_S: Tensor) -> bool:
    """Compare bit patterns, whose order is that of the magnitudes; `amax` is the fastest test."""
    if values_S.dtype == torch.float16:
        return int((values_S.view(torch.int16) & _FP16_MAGNITUDE).amax()) < _FP16_INFINITY
    bits_S = values_S.view(torch.int32) & _FP32_MAGNITUDE
    if int(bits_S.amax()) > _MAX_BITS:
        return False
    # One less, zero becomes the largest: what is below the smallest normal is subnormal.
    return int(bits_S.sub_(1).bitwise_and_(_FP32_MAGNITUDE).amin()) >= _MIN_BITS - 1


def _measure(x_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes that stand for blocks, int32, and their scales; `x_NB` is overwritten."""
    amax_N = x_NB.abs().amax(1)
    scales_N = torch.where(amax_N < MIN_MEASURED, 0.0, amax_N / MAX_MEASURE_CODE)
    # Division by infinity: every code of a block that counts as zero is zero.
    divisors_N = torch.where(scales_N == 0, math.inf, scales_N)
    # No clamp: amax / (amax / 32767), with a rounding each, rounds to 32767.
    return x_NB.div_(divisors_N[:, None]).round_().to(torch.int32), scales_N


def encode_float(x_P: Tensor, codec: CodecSpec) -> FloatGradient:
    """Round `x_P` to the codec's float (arguments and errors: `compression.encode`)."""
    values_P = torch.empty(len(x_P), dtype=FLOAT_DTYPES[codec.id], device=x_P.device)

    def encode_slice(start: int, stop: int) -> None:
        values_S = values_P[start:stop].copy_(x_P[start:stop])
        if values_S.dtype == torch.float32 and not _are_valid(values_S):
            values_S.masked_fill_(values_S.abs() < MIN_MAGNITUDE, 0.0)
        if not _are_valid(values_S):
            raise ContributionRejectedError(
                "the pseudo-gradient has elements that are not finite or beyond the codec's range"
            )

    run_slices(encode_slice, slices(len(values_P), codec.block_elements))
    return FloatGradient(
        values=values_P, num_elements=len(values_P), block_elements=codec.block_elements
    )
