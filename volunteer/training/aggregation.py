"""From the listed contributions of a commit to the aggregate that the outer step takes.

Runs in: aggregator. Stage 5 of a round. Pure.

    q = sum over the list, in list order, of  (weight_i * clip_scale_i) * decoded_i

elementwise on the CPU, each product and each sum rounded once in fp64, cast to fp32 at the end.
Weights and clips come from weighing.py, its numbers from similarity.py. Slices of the vectors are
combined one after the other, so memory does not grow with the model beyond the result.

Shape legend: P parameters, S a slice of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from volunteer.messages import ListedWork, Outcome
from volunteer.run import OuterSpec
from volunteer.training import similarity
from volunteer.training.compression import EncodedGradient, slices
from volunteer.training.outer import outer_step
from volunteer.training.state import SharedState, StateSlice
from volunteer.training.weighing import Measured, weigh


def aggregate(
    blobs: Sequence[EncodedGradient], listed: Sequence[ListedWork], num_parameters: int
) -> tuple[Tensor, tuple[Outcome, ...]]:
    """Combine one commit's contributions.

    Args:
        blobs: parsed blobs in list order, of `num_parameters` elements each, on the CPU.
        listed: what the chain says of each, in the same order.
        num_parameters: P.

    Returns:
        The aggregate, fp32, shape (P,), zeros where nothing is listed, and the outcomes.
    """
    outcomes = judge(blobs, listed)
    aggregate_P = torch.zeros(num_parameters, dtype=torch.float32)
    for start, aggregate_S in combine(blobs, outcomes, num_parameters):
        aggregate_P[start : start + len(aggregate_S)] = aggregate_S
    return aggregate_P, outcomes


def judge(
    blobs: Sequence[EncodedGradient],
    listed: Sequence[ListedWork],
    norms_by_id: Mapping[str, float] | None = None,
) -> tuple[Outcome, ...]:
    """Measure the contributions and apply the rules; outcomes in list order.

    Args:
        blobs: in list order.
        listed: what the chain says of each, in the same order.
        norms_by_id: norms by blob id, where all were measured before.
    """
    if not blobs:
        return ()
    blob_ids = [work.blob_id for work in listed]
    if norms_by_id is None:
        norms_by_id = dict(zip(blob_ids, map(similarity.norm, blobs), strict=True))
    norms = [norms_by_id[blob_id] for blob_id in blob_ids]
    sampled = similarity.sampled_elements(blobs[0].num_elements, blobs[0].block_elements, blob_ids)
    gram = similarity.gram(blobs, blob_ids)
    return weigh(listed, Measured(norms=norms, gram=gram, num_elements=sampled))


def combine(
    blobs: Sequence[EncodedGradient], outcomes: Sequence[Outcome], num_parameters: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, the aggregate's slice, fp32) in order; zeros where nothing is listed.

    Invariant: only separate multiplies and adds, in list order; refused blobs are not touched.
    """
    factors = [outcome.weight * outcome.clip_scale for outcome in outcomes]
    block_elements = blobs[0].block_elements if blobs else 1
    for start, stop in slices(num_parameters, block_elements):
        decoded_S = torch.empty(stop - start, dtype=torch.float32)
        scaled_S = torch.empty(stop - start, dtype=torch.float64)
        sum_S = torch.zeros(stop - start, dtype=torch.float64)
        for blob, factor in zip(blobs, factors, strict=True):
            if factor == 0.0:
                continue
            blob.decode_slice(start, stop, out_S=decoded_S)
            scaled_S.copy_(decoded_S)
            scaled_S.mul_(factor)
            sum_S.add_(scaled_S)
        yield start, sum_S.to(torch.float32)


def next_state_slices(
    parent: SharedState,
    blobs: Sequence[EncodedGradient],
    outcomes: Sequence[Outcome],
    outer: OuterSpec,
) -> Iterator[StateSlice]:
    """Yield the state after the commit, slice by slice: aggregate, then outer step."""
    for start, aggregate_S in combine(blobs, outcomes, len(parent.weights_P)):
        stop = start + len(aggregate_S)
        weights_S, momentum_S = outer_step(
            parent.weights_P[start:stop], parent.momentum_P[start:stop], aggregate_S, outer
        )
        yield StateSlice(start, weights_S, momentum_S)
