"""The coordinate-wise trimmed mean: what is extreme in an element does not count there.

Runs in: aggregator, lab. Stage 5 of a round. Pure.

Of R >= 4 contributions that count, with t = floor(R / 4), in each element by itself:

    x_i = fp32(clip_scale_i * decoded_i)
    low = the (t + 1)-th smallest of x, high = the (t + 1)-th largest
    q = sum of weight_i * x_i / sum of weight_i, both over low <= x_i <= high, in list order

Whatever t of them send, what counts lies between two values of the others: -10 D in a few elements,
or a direction that passes every filter, moves them no further than an honest one might. It costs
what the tails know, and is biased where honest data differ much (ALGORITHMS.md), so it is a run's
choice and not the default.

Paper: arXiv:1803.01498, the trimmed mean with beta = 1/4; its body could not be opened: as in
Flower's and OpenFL's code, `np.partition` at int(beta * R). Differs: those leave the numbers of
examples out; here what is left counts by its weight, or a newcomer, a late one and a tenth of a
day's work would count as much as any. Of equal values all count or none, so at most t are cut on a
side and no order enters.

Shape legend: S a slice of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

MIN_FOR_TRIM = 4
TRIM_PART = 4
"""One in so many is cut on either side: as many as may be struck (rounds/exclusion.py)."""
_CACHED_ELEMENTS = 2**15
"""Rows of so many elements stay in a core's cache while they are compared."""
Comparator = tuple[int, int]


def trimmed_mean(scaled: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Combine one slice.

    Args:
        scaled: the x of each, in list order, fp32, shape (S,), on the CPU; not changed.
        weights: above 0, in the same order.

    Returns:
        The aggregate, fp32, shape (S,).

    Invariant: comparisons, and separate multiplies, adds and divisions in fp64. The bounds may be
    -0 or 0 on different processors, and are compared only.
    """
    pieces = []
    for start in range(0, len(scaled[0]), _CACHED_ELEMENTS):
        part = [x_S[start : start + _CACHED_ELEMENTS] for x_S in scaled]
        pieces.append(_mean_within(part, weights, *_bounds(part)))
    return torch.cat(pieces)


def _mean_within(
    scaled: Sequence[Tensor], weights: Sequence[float], low_S: Tensor, high_S: Tensor
) -> Tensor:
    sum_S = torch.zeros(len(low_S), dtype=torch.float64)
    mass_S = torch.zeros_like(sum_S)
    term_S, share_S = torch.empty_like(sum_S), torch.empty_like(sum_S)
    clamped_S = torch.empty_like(low_S)
    is_kept_S = torch.empty(len(low_S), dtype=torch.bool)
    for x_S, weight in zip(scaled, weights, strict=True):
        torch.clamp(x_S, low_S, high_S, out=clamped_S)
        torch.eq(clamped_S, x_S, out=is_kept_S)
        share_S.copy_(is_kept_S).mul_(weight)
        mass_S.add_(share_S)
        term_S.copy_(x_S)
        sum_S.add_(term_S.mul_(share_S))
    return sum_S.div_(mass_S).to(torch.float32)


def _bounds(scaled: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the (t + 1)-th smallest and largest of each element."""
    rank = len(scaled) // TRIM_PART
    rows = [x_S.clone() for x_S in scaled]
    spare_S = torch.empty_like(rows[0])
    for a, b in _comparators(len(rows), rank):
        torch.minimum(rows[a], rows[b], out=spare_S)
        torch.maximum(rows[a], rows[b], out=rows[b])
        rows[a], spare_S = spare_S, rows[a]
    return rows[rank], rows[-1 - rank]


@lru_cache(maxsize=64)
def _comparators(num_rows: int, rank: int) -> tuple[Comparator, ...]:
    """Return those of a sorting network that the row of `rank` from either end depends on."""
    wanted = {rank, num_rows - 1 - rank}
    needed = []
    for a, b in reversed(list(_merge_exchange(num_rows))):
        if a in wanted or b in wanted:
            wanted |= {a, b}
            needed.append((a, b))
    return tuple(reversed(needed))


def _merge_exchange(num_rows: int) -> Iterator[Comparator]:
    """Yield Batcher's sorting network for any number of rows (Knuth, TAOCP 3, 5.2.2 M)."""
    highest = 1 << max(0, (num_rows - 1).bit_length() - 1)
    step = highest
    while step:
        reach, offset, distance = highest, 0, step
        while True:
            for a in range(num_rows - distance):
                if a & step == offset:
                    yield a, a + distance
            if reach == step:
                break
            distance, reach, offset = reach - step, reach >> 1, step
        step >>= 1
