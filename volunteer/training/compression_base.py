"""What every codec's encoded vector can do. Runs in: trainer, aggregator. Pure.

Aggregation decodes slice by slice; similarity.py needs integers, since only their sums are the same
on every machine. So each codec says how its content is decoded, and how a block of it is measured:
as integer codes with one scale, of which the block's content is the product, or close to it.

Shape legend: P parameters, S a slice of them, N blocks, B = block_elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

MAX_MAGNITUDE = 7 * 2.0**16
"""No training moves a weight by so much; sums of squares stay far from fp64's end."""
MIN_MAGNITUDE = 2.0**-126
"""The smallest normal fp32: decoded values are normal or zero, so flush-to-zero changes nothing."""
_SLICE_ELEMENTS = 2**18  # about 1 MiB of fp32: stays in a core's cache


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedGradient(ABC):
    """A pseudo-gradient in a codec; one that `encode` made, or `verify_bounds` passed, is valid."""

    product_dtype: ClassVar[torch.dtype]
    """Holds the sum of B products of two codes, B at most 65536."""
    measure_dtype: ClassVar[torch.dtype]
    """Holds the product of two codes."""

    num_elements: int
    """P."""
    block_elements: int
    """B: of the codec's blocks, or of the blocks in which it is measured."""

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """What the blob holds, in the order of `contribution_blob.BlobKey.entries`."""

    @abstractmethod
    def decode_slice(self, start: int, stop: int, *, out_S: Tensor) -> None:
        """Decode elements start..stop, as `slices` cuts them, into `out_S` (fp32, overwritten).

        As the measuring ones, it may be called from several threads at once.
        """

    @abstractmethod
    def measure_slice(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the codes and scales of elements start..stop, as `slices` cuts them.

        Returns:
            Codes, `measure_dtype`, shape (N, B), the last block filled up with zeros, or shape
            (N, K), K of each block that are kept, and no others; scales, fp32, shape (N,).
        """

    @abstractmethod
    def measure_block(self, block_index: int) -> tuple[Tensor, Tensor]:
        """Return one block's codes, shape (B,), filled up with zeros, and its scale, shape ().

        The codes have `measure_dtype`.
        """

    @abstractmethod
    def verify_bounds(self) -> None:
        """Check what a stranger may have put into tensors of the right sizes.

        Raises:
            ContributionRejectedError: something that `encode` never makes.
        """


def slices(num_elements: int, block_elements: int) -> Iterator[tuple[int, int]]:
    """Cut 0..num_elements into (start, stop) that begin at a block and at a whole byte."""
    step = 2 * block_elements * max(1, _SLICE_ELEMENTS // (2 * block_elements))
    for start in range(0, num_elements, step):
        yield start, min(start + step, num_elements)
