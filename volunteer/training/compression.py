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
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from volunteer.errors import ContributionRejectedError
from volunteer.run import CodecSpec

MAX_CODE = 7
MIN_SCALE = 2.0**-126
"""The smallest normal fp32: decoded values are normal or zero, so flush-to-zero changes nothing."""
MAX_SCALE = 2.0**16
"""No training moves a weight by 7 * 65536; sums of squares stay far from fp64's end."""
_SLICE_ELEMENTS = 2**18  # about 1 MiB of fp32: stays in a core's cache
_NIBBLE_OF_ZERO = 8
# Non-negative floats are ordered as their bit patterns: one integer comparison keeps out negative
# zero, negative, subnormal, too large, infinite and not-a-number scales.
_MIN_SCALE_BITS = int(np.float32(MIN_SCALE).view(np.int32))
_MAX_SCALE_BITS = int(np.float32(MAX_SCALE).view(np.int32))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedGradient:
    """A pseudo-gradient in int4; one that `encode` made, or `verify_bounds` passed, is valid."""

    codes: Tensor
    """Packed codes, uint8, shape (ceil(P / 2),)."""
    scales: Tensor
    """One a block, fp32, shape (N,); 0 or MIN_SCALE..MAX_SCALE."""
    num_elements: int
    """P."""
    block_elements: int


def slices(num_elements: int, block_elements: int) -> Iterator[tuple[int, int]]:
    """Cut 0..num_elements into (start, stop) that begin at a block and at a whole byte."""
    step = 2 * block_elements * max(1, _SLICE_ELEMENTS // (2 * block_elements))
    for start in range(0, num_elements, step):
        yield start, min(start + step, num_elements)


def encode(x_P: Tensor, codec: CodecSpec) -> EncodedGradient:
    """Compress `x_P`.

    Args:
        x_P: the vector, fp32 or fp64, any device, shape (P,); not changed.
        codec: the RunSpec's codec.

    Raises:
        ContributionRejectedError: an element is not finite, or too large for any member to accept.
    """
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
    return EncodedGradient(
        codes=codes, scales=scales, num_elements=num_elements, block_elements=block
    )


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


def decode(encoded: EncodedGradient) -> Tensor:
    """Return the decoded vector, fp32, shape (P,), on the device of the codes."""
    decoded_P = torch.empty(encoded.num_elements, dtype=torch.float32, device=encoded.codes.device)
    for start, stop in slices(encoded.num_elements, encoded.block_elements):
        decode_slice(encoded, start, stop, out_S=decoded_P[start:stop])
    return decoded_P


def decode_slice(encoded: EncodedGradient, start: int, stop: int, *, out_S: Tensor) -> None:
    """Decode elements start..stop, as `slices` cuts them, into `out_S` (fp32, overwritten)."""
    block = encoded.block_elements
    codes_to(encoded, start, stop, out_S=out_S)
    num_whole = (stop - start) // block
    first = start // block
    whole_NB = out_S[: num_whole * block].view(num_whole, block)
    whole_NB.mul_(encoded.scales[first : first + num_whole, None])
    out_S[num_whole * block :].mul_(encoded.scales[first + num_whole : first + num_whole + 1])


def codes_to(encoded: EncodedGradient, start: int, stop: int, *, out_S: Tensor) -> None:
    """Write the codes -7..7 of elements start..stop into `out_S` (any signed dtype, overwritten).

    `start` is even.
    """
    packed = encoded.codes[start // 2 : math.ceil(stop / 2)]
    out_S[0::2] = packed & 0x0F
    out_S[1::2] = (packed >> 4)[: (stop - start) // 2]
    out_S.sub_(_NIBBLE_OF_ZERO)


def verify_bounds(encoded: EncodedGradient) -> None:
    """Check what a stranger may have put into codes and scales of the right sizes.

    Raises:
        ContributionRejectedError: a code -8, a scale that is not 0 or in MIN_SCALE..MAX_SCALE, or
            padding that is not zero.
    """
    bits = encoded.scales.view(torch.int32)
    if not bool(((bits == 0) | ((bits >= _MIN_SCALE_BITS) & (bits <= _MAX_SCALE_BITS))).all()):
        raise ContributionRejectedError(
            "the blob has a scale that is negative, not finite or out of bounds"
        )
    for start in range(0, len(encoded.codes), _SLICE_ELEMENTS):
        packed = encoded.codes[start : start + _SLICE_ELEMENTS]
        if bool((((packed & 0x0F) == 0) | (packed < 0x10)).any()):
            raise ContributionRejectedError("the blob has a code outside -7..7")
    if encoded.num_elements % 2 and int(encoded.codes[-1]) >> 4 != _NIBBLE_OF_ZERO:
        raise ContributionRejectedError("the blob's padding is not zero")
