"""The dense codec `int4`, version 1: half a byte an element.

Runs in: trainer (encoding), aggregator (decoding). Stages 3 and 5 of a round. Pure.

Codes are -7..7 (compression_block.py), two to a byte along the flat vector, the even element in the
low nibble, as code + 8; nibble 0 (code -8) does not occur.

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

MAX_CODE = 7
MAX_SCALE = MAX_MAGNITUDE / MAX_CODE
_NIBBLE_OF_ZERO = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int4Gradient(BlockGradient):
    """A pseudo-gradient in int4; `codes` is packed, uint8, shape (ceil(P / 2),)."""

    product_dtype: ClassVar[torch.dtype] = torch.int32  # 65536 * 49 < 2^31
    measure_dtype: ClassVar[torch.dtype] = torch.int8

    def codes_to(self, start: int, stop: int, *, out_S: Tensor) -> None:
        """Unpack the codes of a slice into `out_S`."""
        packed = self.codes[start // 2 : math.ceil(stop / 2)]
        out_S[0::2] = packed & 0x0F
        out_S[1::2] = (packed >> 4)[: (stop - start) // 2]
        out_S.sub_(_NIBBLE_OF_ZERO)

    def verify_bounds(self) -> None:
        """Check codes and scales.

        Raises:
            ContributionRejectedError: a code -8, a scale that is not 0 or in MIN_SCALE..MAX_SCALE,
                or padding that is not zero.
        """
        verify_scales(self.scales, MAX_SCALE)
        run_slices(self._verify_codes, slices(len(self.codes), self.block_elements))
        if self.num_elements % 2 and int(self.codes[-1]) >> 4 != _NIBBLE_OF_ZERO:
            raise ContributionRejectedError("the blob's padding is not zero")

    def _verify_codes(self, start: int, stop: int) -> None:
        packed = self.codes[start:stop]
        if int((packed & 0x0F).amin()) == 0 or int(packed.amin()) < 0x10:
            raise ContributionRejectedError("the blob has a code outside -7..7")


def encode_int4(x_P: Tensor, codec: CodecSpec) -> Int4Gradient:
    """Compress `x_P` (arguments and errors: `compression.encode`)."""
    num_elements, block = x_P.numel(), codec.block_elements
    codes = torch.empty(math.ceil(num_elements / 2), dtype=torch.uint8, device=x_P.device)
    scales = torch.empty(math.ceil(num_elements / block), dtype=torch.float32, device=x_P.device)

    def encode_slice(start: int, stop: int) -> None:
        scales_N, codes_S = quantise(x_P[start:stop], block, MAX_CODE)
        scales[start // block : start // block + len(scales_N)] = scales_N
        nibbles_S = codes_S.add_(_NIBBLE_OF_ZERO).to(torch.uint8)
        even = torch.nn.functional.pad(nibbles_S, (0, len(nibbles_S) % 2), value=_NIBBLE_OF_ZERO)
        codes[start // 2 : math.ceil(stop / 2)] = even[0::2] | (even[1::2] << 4)

    run_slices(encode_slice, slices(num_elements, block))
    verify_encoded(scales, MAX_SCALE)
    return Int4Gradient(codes=codes, scales=scales, num_elements=num_elements, block_elements=block)
