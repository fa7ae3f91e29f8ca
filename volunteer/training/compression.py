"""The codecs that a RunSpec can name: from a vector to what is sent, and back.

Runs in: trainer (encoding), aggregator (decoding). Stages 3 and 5 of a round. Pure.

| id   | bytes an element | what an element keeps               | source file          |
|------|------------------|-------------------------------------|----------------------|
| int8 | 1.001 (B = 4096) | 255 levels of its block's largest   | compression_int8.py  |
| int4 | 0.501 (B = 4096) | 15 levels of its block's largest    | compression_int4.py  |
| fp16 | 2                | 11 bits, nothing below 2^-25        | compression_float.py |
| fp32 | 4                | all                                 | compression_float.py |

Each has version 1, and the same error feedback: what a member's own decoding shows to be lost is
part of its next contribution. Decoding is the same to the last bit on every machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from volunteer.run import CodecSpec
from volunteer.training.blob_format import TensorEntry
from volunteer.training.compression_base import EncodedGradient, slices
from volunteer.training.compression_float import FLOAT_DTYPES, FloatGradient, encode_float
from volunteer.training.compression_int4 import Int4Gradient, encode_int4
from volunteer.training.compression_int8 import Int8Gradient, encode_int8

__all__ = ["EncodedGradient", "decode", "encode", "from_tensors", "slices", "tensor_entries"]

_ENCODERS: dict[str, Callable[[Tensor, CodecSpec], EncodedGradient]] = {
    "int4": encode_int4,
    "int8": encode_int8,
    "fp16": encode_float,
    "fp32": encode_float,
}


def encode(x_P: Tensor, codec: CodecSpec, round_index: int = 0) -> EncodedGradient:
    """Compress `x_P`.

    Args:
        x_P: the vector, fp32 or fp64, any device, shape (P,); not changed.
        codec: the RunSpec's codec.
        round_index: of the contribution; a dense codec does not look at it.

    Raises:
        ContributionRejectedError: an element is not finite, or too large for any member to accept.
    """
    return _ENCODERS[codec.id](x_P, codec)


def decode(encoded: EncodedGradient) -> Tensor:
    """Return the decoded vector, fp32, shape (P,), on the device of what was encoded."""
    device = encoded.tensors[0].device
    decoded_P = torch.empty(encoded.num_elements, dtype=torch.float32, device=device)
    for start, stop in slices(encoded.num_elements, encoded.block_elements):
        encoded.decode_slice(start, stop, out_S=decoded_P[start:stop])
    return decoded_P


def subtract_decoded(encoded: EncodedGradient, x_P: Tensor) -> None:
    """Subtract the decoded vector from `x_P` (fp32 or fp64, same device) in place, by slices."""
    for start, stop in slices(encoded.num_elements, encoded.block_elements):
        decoded_S = torch.empty(stop - start, dtype=torch.float32, device=x_P.device)
        encoded.decode_slice(start, stop, out_S=decoded_S)
        x_P[start:stop] -= decoded_S


def tensor_entries(codec: CodecSpec, num_elements: int) -> tuple[TensorEntry, ...]:
    """Return the tensors of a blob in their order; larger numbers first, so all are aligned."""
    if codec.id in FLOAT_DTYPES:
        return (TensorEntry("values", {"fp16": "F16", "fp32": "F32"}[codec.id], (num_elements,)),)
    scales = TensorEntry("scales", "F32", (-(-num_elements // codec.block_elements),))
    if codec.id == "int8":
        return scales, TensorEntry("codes", "I8", (num_elements,))
    return scales, TensorEntry("codes", "U8", (-(-num_elements // 2),))


def from_tensors(
    tensors: tuple[Tensor, ...], codec: CodecSpec, num_elements: int
) -> EncodedGradient:
    """Return what a blob's tensors hold; the caller calls `verify_bounds`.

    Args:
        tensors: of the dtypes and shapes of `tensor_entries`; used without a copy.
        codec: the RunSpec's codec.
        num_elements: P.
    """
    block = codec.block_elements
    if codec.id in FLOAT_DTYPES:
        (values,) = tensors
        return FloatGradient(values=values, num_elements=num_elements, block_elements=block)
    scales, codes = tensors
    gradient = Int8Gradient if codec.id == "int8" else Int4Gradient
    return gradient(codes=codes, scales=scales, num_elements=num_elements, block_elements=block)
