"""Sets of K indices below B, as Elias and Fano wrote them: in a number of bits known beforehand.

Runs in: trainer, aggregator. Pure.

Sorted, the low `offset_bits` of each index are stored as they are. The rest, which never falls, is
in unary: of the index of rank r, bit `(index >> offset_bits) + r` of `places` is set. So K indices
take K * (offset_bits + 1) + (B >> offset_bits) bits, always (`run.index_bits`), and one set has one
form. At 64 of 4096 that is 8 bits an index; the least is 7.4, and packed they would take 12. From
K = B / 4 on, a plain bitmap is as short: `offset_bits` is 0 and `places` is that.

Bits lie in bytes from the lowest up; every row of them is whole bytes. Shape legend: R rows, a set
each.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from volunteer.run import index_bits

Bytes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.int64]


def pack(bits: Bits) -> Bytes:
    """Return rows of bits as bytes, flat."""
    return np.packbits(bits.reshape(-1), bitorder="little")


def unpack(packed: Bytes, first: int, behind: int, num_bits: int) -> Bits:
    """Return the bits of rows first..behind, shape (R, num_bits)."""
    num_bytes = num_bits // 8
    part = packed[first * num_bytes : behind * num_bytes]
    bits: Bits = np.unpackbits(part, bitorder="little").view(np.bool_)
    return bits.reshape(behind - first, num_bits)


def encode_indices(indices_RK: Indices, block: int) -> tuple[Bytes, Bytes]:
    """Return `places` and `offsets` of sets of sorted indices below `block`."""
    num_rows, kept = indices_RK.shape
    offset_bits, place_bits = index_bits(kept, block)
    is_place_R = np.zeros((num_rows, place_bits), dtype=np.bool_)
    places_RK = (indices_RK >> offset_bits) + np.arange(kept) if offset_bits else indices_RK
    is_place_R[np.arange(num_rows)[:, None], places_RK] = True
    planes = np.empty((num_rows, offset_bits, kept), dtype=np.bool_)
    for bit in range(offset_bits):
        planes[:, bit] = (indices_RK >> bit) & 1
    return pack(is_place_R), pack(planes)


def decode_indices(
    places: Bytes, offsets: Bytes, kept: int, block: int, *, first: int, behind: int
) -> Indices:
    """Return the indices of rows first..behind, int64, shape (R, K).

    Args:
        places: exactly `kept` bits a row are set.
        offsets: for each row and low bit of the indices, lowest first, K bits.
        kept: K.
        block: B.
        first: the first row.
        behind: the one behind the last.
    """
    num_rows = behind - first
    offset_bits, place_bits = index_bits(kept, block)
    indices_RK = np.flatnonzero(unpack(places, first, behind, place_bits)).reshape(num_rows, kept)
    indices_RK -= np.arange(num_rows)[:, None] * place_bits
    if not offset_bits:
        return indices_RK
    indices_RK -= np.arange(kept)
    indices_RK <<= offset_bits
    planes = unpack(offsets, first, behind, kept * offset_bits)
    planes = planes.reshape(num_rows, offset_bits, kept)
    for bit in range(offset_bits):
        indices_RK |= planes[:, bit].astype(np.int64) << bit
    return indices_RK


def are_sets(
    places: Bytes, offsets: Bytes, kept: int, block: int, *, first: int, behind: int
) -> bool:
    """Tell whether rows first..behind hold sets in the one form (arguments: `decode_indices`).

    `places` may hold anything.
    """
    offset_bits, place_bits = index_bits(kept, block)
    is_place_R = unpack(places, first, behind, place_bits)
    if bool((np.count_nonzero(is_place_R, axis=1) != kept).any()):
        return False
    if not offset_bits:
        return True
    if bool(is_place_R[:, -1].any()):  # behind all B >> offset_bits zeros: beyond the block
        return False
    indices_RK = decode_indices(places, offsets, kept, block, first=first, behind=behind)
    return bool((np.diff(indices_RK) > 0).all())
