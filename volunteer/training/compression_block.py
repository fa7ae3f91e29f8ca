"""What the codecs with one scale a block have in common: `int4` and `int8`.

Runs in: trainer (encoding), aggregator (decoding). Stages 3 and 5 of a round. Pure.

The vector is cut into blocks. A block has one fp32 scale, amax / MAX, and an element a code
-MAX..MAX (7 or 127); it decodes to code * scale, one rounding, the same on every machine.
|x - decoded| <= scale / 2, and what is lost stays in the error feedback.

Shape legend: P parameters, S a slice of them, N = ceil(P / block_elements) blocks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from volunteer.errors import ContributionRejectedError
from volunteer.training.compression_base import MIN_MAGNITUDE, EncodedGradient

MIN_SCALE = MIN_MAGNITUDE
# Non-negative floats are ordered as their bit patterns: one integer comparison keeps out negative
# zero, negative, subnormal, too large, infinite and not-a-number scales.
_MIN_SCALE_BITS = int(np.float32(MIN_SCALE).view(np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockGradient(EncodedGradient):
    """A pseudo-gradient in codes with one scale a block."""

    codes: Tensor
    """As the blob holds them."""
    scales: Tensor
    """One a block, fp32, shape (N,); 0 or MIN_SCALE..the codec's largest."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Scales first, so that they are aligned."""
        return self.scales, self.codes

    @abstractmethod
    def codes_to(self, start: int, stop: int, *, out_S: Tensor) -> None:
        """Write the codes of elements start..stop into `out_S` (signed dtype); `start` is even."""

    def decode_slice(self, start: int, stop: int, *, out_S: Tensor) -> None:
        """Decode a slice."""
        block = self.block_elements
        self.codes_to(start, stop, out_S=out_S)
        num_whole = (stop - start) // block
        first = start // block
        whole_NB = out_S[: num_whole * block].view(num_whole, block)
        whole_NB.mul_(self.scales[first : first + num_whole, None])
        out_S[num_whole * block :].mul_(self.scales[first + num_whole : first + num_whole + 1])

    def measure_slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return codes and scales as they are: what is measured is exactly the content."""
        block = self.block_elements
        num_blocks = math.ceil((stop - start) / block)
        codes_S = torch.zeros(num_blocks * block, dtype=self.measure_dtype)
        self.codes_to(start, stop, out_S=codes_S[: stop - start])
        first = start // block
        return codes_S.view(num_blocks, block), self.scales[first : first + num_blocks]

    def measure_block(self, block_index: int) -> tuple[Tensor, Tensor]:
        """Return one block's codes and scale."""
        start = block_index * self.block_elements
        stop = min(start + self.block_elements, self.num_elements)
        even_start = start - start % 2  # int4 has two codes in a byte
        codes_B = torch.zeros(1 + self.block_elements, dtype=self.measure_dtype)
        self.codes_to(even_start, stop, out_S=codes_B[: stop - even_start])
        return codes_B[start % 2 :][: self.block_elements], self.scales[block_index]


def verify_scales(scales_N: Tensor, max_scale: float) -> None:
    """Check that every scale is 0 or MIN_SCALE..max_scale.

    Raises:
        ContributionRejectedError: one is not.
    """
    bits_N = scales_N.view(torch.int32)
    max_bits = int(np.float32(max_scale).view(np.int32))
    if not bool(((bits_N == 0) | ((bits_N >= _MIN_SCALE_BITS) & (bits_N <= max_bits))).all()):
        raise ContributionRejectedError(
            "the blob has a scale that is negative, not finite or out of bounds"
        )


def verify_encoded(scales_N: Tensor, max_scale: float) -> None:
    """Check the scales that an encoder has made of finite elements, or of others.

    Raises:
        ContributionRejectedError: nobody would accept them.
    """
    if not bool((scales_N <= max_scale).all()):  # false for NaN too
        raise ContributionRejectedError(
            "the pseudo-gradient has elements that are not finite or beyond the codec's range"
        )


def quantise(x_S: Tensor, block: int, max_code: int) -> tuple[Tensor, Tensor]:
    """Return the scales, fp32, of a slice's blocks, and its codes, in the dtype of `x_S`."""
    num_blocks = math.ceil(len(x_S) / block)
    x_NB = torch.nn.functional.pad(x_S, (0, num_blocks * block - len(x_S))).view(num_blocks, block)
    scales_N = (x_NB.abs().amax(1) / max_code).to(torch.float32)
    scales_N = torch.where(scales_N < MIN_SCALE, 0.0, scales_N)
    divisors_N = torch.where(scales_N == 0, 1.0, scales_N).to(x_S.dtype)
    codes_NB = (x_NB / divisors_N[:, None]).round_().clamp_(-max_code, max_code)
    return scales_N, codes_NB.view(-1)[: len(x_S)]
