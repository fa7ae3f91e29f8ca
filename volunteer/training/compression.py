"""The codecs that a RunSpec can name: from a vector to what is sent, and back.

Runs in: trainer (encoding), aggregator (decoding). Stages 3 and 5 of a round. Pure.

| id   | bytes an element | what an element keeps               | source file          |
|------|------------------|-------------------------------------|----------------------|
| int8 | 1.001 (B = 4096) | 255 levels of its block's largest   | compression_int8.py  |
| int4 | 0.501 (B = 4096) | 15 levels of its block's largest    | compression_int4.py  |
| topk2| 0.021 (K = 64)   | sign and two sizes of the largest   | compression_topk2.py |
| fp16 | 2                | 11 bits, nothing below 2^-25        | compression_float.py |
| fp32 | 4                | all                                 | compression_float.py |

Each has version 1 (topk2's bytes are for 64 of 4096; for 256 they are 0.063, for 1024 0.189), and
the same error feedback: what a member's own decoding shows to be lost is part of its next
contribution. Decoding is the same to the last bit on every machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from volunteer.run import CodecSpec, index_bits
from volunteer.training.blob_format import TensorEntry
from volunteer.training.compression_base import EncodedGradient, slices
from volunteer.training.compression_float import FLOAT_DTYPES, FloatGradient, encode_float
from volunteer.training.compression_int4 import Int4Gradient, encode_int4
from volunteer.training.compression_int8 import Int8Gradient, encode_int8
from volunteer.training.compression_topk2 import TopK2Gradient, encode_topk2
from volunteer.training.slice_threads import run_slices

__all__ = [
    "EncodedGradient",
    "decode",
    "decode_into",
    "encode",
    "from_tensors",
    "slices",
    "subtract_decoded",
    "tensor_entries",
]

_DENSE_ENCODERS: dict[str, Callable[[Tensor, CodecSpec], EncodedGradient]] = {
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
    if codec.id == "topk2":
        return encode_topk2(x_P, codec, round_index)
    return _DENSE_ENCODERS[codec.id](x_P, codec)


def decode(encoded: EncodedGradient) -> Tensor:
    """Return the decoded vector, fp32, shape (P,), on the device of what was encoded."""
    device = encoded.tensors[0].device
    decoded_P = torch.empty(encoded.num_elements, dtype=torch.float32, device=device)
    decode_into(encoded, decoded_P)
    return decoded_P


def decode_into(encoded: EncodedGradient, out_P: Tensor) -> None:
    """Decode into `out_P`, fp32, shape (P,), overwritten."""

    def decode_slice(start: int, stop: int) -> None:
        encoded.decode_slice(start, stop, out_S=out_P[start:stop])

    run_slices(decode_slice, slices(encoded.num_elements, encoded.block_elements))


def subtract_decoded(encoded: EncodedGradient, x_P: Tensor) -> None:
    """Subtract the decoded vector from `x_P` (fp32 or fp64, same device) in place, by slices."""

    def subtract_slice(start: int, stop: int) -> None:
        decoded_S = torch.empty(stop - start, dtype=torch.float32, device=x_P.device)
        encoded.decode_slice(start, stop, out_S=decoded_S)
        x_P[start:stop] -= decoded_S

    run_slices(subtract_slice, slices(encoded.num_elements, encoded.block_elements))


def tensor_entries(
    codec: CodecSpec, num_elements: int, round_index: int
) -> tuple[TensorEntry, ...]:
    """Return the tensors of a blob in their order; larger numbers first, so all are aligned."""
    num_blocks = -(-num_elements // codec.block_elements)
    match codec.id:
        case "fp16" | "fp32":
            name = {"fp16": "F16", "fp32": "F32"}[codec.id]
            return (TensorEntry("values", name, (num_elements,)),)
        case "topk2":
            return _topk2_entries(codec.num_kept(round_index), codec.block_elements, num_blocks)
        case "int8":
            codes = TensorEntry("codes", "I8", (num_elements,))
        case _:
            codes = TensorEntry("codes", "U8", (-(-num_elements // 2),))
    return TensorEntry("scales", "F32", (num_blocks,)), codes


def _topk2_entries(kept: int, block: int, num_blocks: int) -> tuple[TensorEntry, ...]:
    offset_bits, place_bits = index_bits(kept, block)
    bits_by_name = {"places": place_bits, "offsets": offset_bits * kept} | dict.fromkeys(
        ("larges", "signs"), kept
    )
    return (
        TensorEntry("scales", "F32", (num_blocks,)),
        TensorEntry("levels", "U8", (num_blocks,)),
        *(TensorEntry(name, "U8", (num_blocks * n // 8,)) for name, n in bits_by_name.items()),
    )


def from_tensors(
    tensors: tuple[Tensor, ...], codec: CodecSpec, num_elements: int, round_index: int
) -> EncodedGradient:
    """Return what a blob's tensors hold; the caller calls `verify_bounds`.

    Args:
        tensors: of the dtypes and shapes of `tensor_entries`; used without a copy.
        codec: the RunSpec's codec.
        num_elements: P.
        round_index: of the contribution.
    """
    block = codec.block_elements
    if codec.id in FLOAT_DTYPES:
        (values,) = tensors
        return FloatGradient(values=values, num_elements=num_elements, block_elements=block)
    if codec.id == "topk2":
        scales, levels, places, offsets, larges, signs = tensors
        return TopK2Gradient(
            num_elements=num_elements,
            block_elements=block,
            kept_elements=codec.num_kept(round_index),
            scales=scales,
            levels=levels,
            places=places,
            offsets=offsets,
            larges=larges,
            signs=signs,
        )
    scales, codes = tensors
    gradient = Int8Gradient if codec.id == "int8" else Int4Gradient
    return gradient(codes=codes, scales=scales, num_elements=num_elements, block_elements=block)
