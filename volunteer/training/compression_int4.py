"""The dense codec `int4`, version 1.

Runs in: trainer (encoding), aggregator (decoding). Stages 3 and 5 of a round. Pure.

The vector is cut into blocks. A block has one fp32 scale, amax / 7, and a code -7..7 an element;
an element is code * scale, one rounding, the same on every machine. |x - decoded| <= scale / 2, and
what is lost stays in the error feedback. Codes lie two to a byte along the flat vector, the even
element in the low nibble, as code + 8; nibble 0 (code -8) does not occur.

Shape legend: P parameters, S a slice of them, N = ceil(P / block_elements) blocks.
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
from volunteer.training import compression_base
from volunteer.training.compression_base import (
    MAX_MAGNITUDE,
    MIN_MAGNITUDE,
    EncodedGradient,
    slices,
)

MAX_CODE = 7
MIN_SCALE = MIN_MAGNITUDE
MAX_SCALE = MAX_MAGNITUDE / MAX_CODE
_NIBBLE_OF_ZERO = 8
# Non-negative floats are ordered as their bit patterns: one integer comparison keeps out negative
# zero, negative, subnormal, too large, infinite and not-a-number scales.
_MIN_SCALE_BITS = int(np.float32(MIN_SCALE).view(np.int32))
_MAX_SCALE_BITS = int(np.float32(MAX_SCALE).view(np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Int4Gradient(EncodedGradient):
    """A pseudo-gradient in int4."""

    product_dtype: ClassVar[torch.dtype] = torch.int32  # 65536 * 49 < 2^31

    codes: Tensor
    """Packed codes, uint8, shape (ceil(P / 2),)."""
    scales: Tensor
    """One a block, fp32, shape (N,); 0 or MIN_SCALE..MAX_SCALE."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Scales first, so that they are aligned."""
        return self.scales, self.codes

    def decode_slice(self, start: int, stop: int, *, out_S: Tensor) -> None:
        """Decode a slice."""
        block = self.block_elements
        self._codes_to(start, stop, out_S=out_S)
        num_whole = (stop - start) // block
        first = start // block
        whole_NB = out_S[: num_whole * block].view(num_whole, block)
        whole_NB.mul_(self.scales[first : first + num_whole, None])
        out_S[num_whole * block :].mul_(self.scales[first + num_whole : first + num_whole + 1])

    def measure_slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return codes (int8) and scales as they are: what is measured is exactly the content."""
        block = self.block_elements
        num_blocks = math.ceil((stop - start) / block)
        codes_S = torch.zeros(num_blocks * block, dtype=torch.int8)
        self._codes_to(start, stop, out_S=codes_S[: stop - start])
        first = start // block
        return codes_S.view(num_blocks, block), self.scales[first : first + num_blocks]

    def measure_block(self, block_index: int) -> tuple[Tensor, Tensor]:
        """Return one block's codes (int8) and scale."""
        start = block_index * self.block_elements
        stop = min(start + self.block_elements, self.num_elements)
        even_start = start - start % 2  # a byte holds two codes
        codes_B = torch.zeros(1 + self.block_elements, dtype=torch.int8)
        self._codes_to(even_start, stop, out_S=codes_B[: stop - even_start])
        return codes_B[start % 2 :][: self.block_elements], self.scales[block_index]

    def _codes_to(self, start: int, stop: int, *, out_S: Tensor) -> None:
        """Write the codes -7..7 of elements start..stop into `out_S` (any signed dtype).

        `start` is even.
        """
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
        bits = self.scales.view(torch.int32)
        if not bool(((bits == 0) | ((bits >= _MIN_SCALE_BITS) & (bits <= _MAX_SCALE_BITS))).all()):
            raise ContributionRejectedError(
                "the blob has a scale that is negative, not finite or out of bounds"
            )
        step = compression_base._SLICE_ELEMENTS
        for start in range(0, len(self.codes), step):
            packed = self.codes[start : start + step]
            if int((packed & 0x0F).amin()) == 0 or int(packed.amin()) < 0x10:
                raise ContributionRejectedError("the blob has a code outside -7..7")
        if self.num_elements % 2 and int(self.codes[-1]) >> 4 != _NIBBLE_OF_ZERO:
            raise ContributionRejectedError("the blob's padding is not zero")


def encode_int4(x_P: Tensor, codec: CodecSpec) -> Int4Gradient:
    """Compress `x_P` (arguments and errors: `compression.encode`)."""
    num_elements, block = x_P.numel(), codec.block_elements
    codes = torch.empty(math.ceil(num_elements / 2), dtype=torch.uint8, device=x_P.device)
    scales = torch.empty(math.ceil(num_elements / block), dtype=torch.float32, device=x_P.device)
    for start, stop in slices(num_elements, block):
        scales_N, nibbles_S = _quantise(x_P[start:stop], block)
        scales[start // block : start // block + len(scales_N)] = scales_N
        codes[start // 2 : math.ceil(stop / 2)] = nibbles_S[0::2] | (nibbles_S[1::2] << 4)
    if not bool((scales <= MAX_SCALE).all()):  # false for NaN too
        raise ContributionRejectedError(
            "the pseudo-gradient has elements that are not finite or beyond the codec's range"
        )
    return Int4Gradient(codes=codes, scales=scales, num_elements=num_elements, block_elements=block)


def _quantise(x_S: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the scales and nibbles (uint8, padded to an even count) of one slice."""
    num_blocks = math.ceil(len(x_S) / block)
    x_NB = torch.nn.functional.pad(x_S, (0, num_blocks * block - len(x_S))).view(num_blocks, block)
    scales_N = (x_NB.abs().amax(1) / MAX_CODE).to(torch.float32)
    scales_N = torch.where(scales_N < MIN_SCALE, 0.0, scales_N)
    divisors_N = torch.where(scales_N == 0, 1.0, scales_N).to(x_S.dtype)
    codes_NB = (x_NB / divisors_N[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE)
    nibbles_S = codes_NB.add_(_NIBBLE_OF_ZERO).to(torch.uint8).view(-1)[: len(x_S)]
    return scales_N, torch.nn.functional.pad(nibbles_S, (0, len(x_S) % 2), value=_NIBBLE_OF_ZERO)
