"""The dense codec `int8`, version 1: a byte an element.

Runs in: trainer (encoding), aggregator (decoding). Stages 3 and 5 of a round. Pure.

Codes are -127..127, one signed byte each (compression_block.py); -128 does not occur.

Shape legend: P parameters, S a slice of them, N blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from volunteer.errors import ContributionRejectedError
from volunteer.run import CodecSpec
from volunteer.training.compression_base import MAX_MAGNITUDE, slices
from volunteer.training.compression_block import (
    BlockGradient,
    quantise,
    verify_encoded,
    verify_scales,
)
from volunteer.training.slice_threads import run_slices

MAX_CODE = 127
MAX_SCALE = float(MAX_MAGNITUDE // MAX_CODE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int8Gradient(BlockGradient):
    """A pseudo-gradient in int8; `codes` is int8, shape (P,)."""

    product_dtype: ClassVar[torch.dtype] = torch.int32  # 65536 * 127^2 < 2^31
    measure_dtype: ClassVar[torch.dtype] = torch.int16

    def codes_to(self, start: int, stop: int, *, out_S: Tensor) -> None:
        """Write the codes of a slice into `out_S`."""
        out_S.copy_(self.codes[start:stop])

    def verify_bounds(self) -> None:
        """Check codes and scales.

        Raises:
            ContributionRejectedError: a code -128, or a scale that is not 0 or in
                MIN_SCALE..MAX_SCALE.
        """
        verify_scales(self.scales, MAX_SCALE)
        run_slices(self._verify_codes, slices(self.num_elements, self.block_elements))

    def _verify_codes(self, start: int, stop: int) -> None:
        if int(self.codes[start:stop].amin()) < -MAX_CODE:
            raise ContributionRejectedError("the blob has a code outside -127..127")


def encode_int8(x_P: Tensor, codec: CodecSpec) -> Int8Gradient:
    """Compress `x_P` (arguments and errors: `compression.encode`)."""
    num_elements, block = x_P.numel(), codec.block_elements
    codes = torch.empty(num_elements, dtype=torch.int8, device=x_P.device)
    scales = torch.empty(math.ceil(num_elements / block), dtype=torch.float32, device=x_P.device)

    def encode_slice(start: int, stop: int) -> None:
        scales_N, codes_S = quantise(x_P[start:stop], block, MAX_CODE)
        scales[start // block : start // block + len(scales_N)] = scales_N
        codes[start:stop] = codes_S

    run_slices(encode_slice, slices(num_elements, block))
    verify_encoded(scales, MAX_SCALE)
    return Int8Gradient(codes=codes, scales=scales, num_elements=num_elements, block_elements=block)
