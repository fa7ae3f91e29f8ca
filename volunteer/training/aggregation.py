"""From the listed contributions of a commit to the aggregate that the outer step takes.

Runs in: aggregator. Stage 5 of a round. Pure.

    q = sum over the list, in list order, of  (weight_i * clip_scale_i) * decoded_i

elementwise on the CPU, each product and each sum rounded once in fp64, cast to fp32 at the end.
With a sparse codec, an element is divided by what those who sent it weigh together:

    q_j = sum over the senders of j of (w_i * clip_scale_i) * decoded_ij
          / max(sum over the senders of j of w_i, 1 / sqrt(R))      R: contributions of weight > 0

Paper: arXiv:2508.15706 divides by R, its code by the number of senders (as here, at equal weights):
by R, what one alone sends would move the weights by an R-th of it. Differs: the divisor has a
floor, as that of sqrt(R) senders, so that one peer cannot own a rare index.

A run with a dense codec may ask for the trimmed mean instead (trimmed_mean.py).

Weights and clips come from weighing.py, its numbers from similarity.py. Slices of the vectors are
combined by themselves, so memory does not grow with the model beyond the result.

Shape legend: P parameters, S a slice of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from volunteer.messages import ListedWork, Outcome
from volunteer.run import Aggregation, OuterSpec
from volunteer.training import similarity
from volunteer.training.compression import EncodedGradient, slices
from volunteer.training.compression_topk2 import TopK2Gradient
from volunteer.training.outer import outer_step
from volunteer.training.slice_threads import map_slices
from volunteer.training.state import SharedState, StateSlice
from volunteer.training.trimmed_mean import MIN_FOR_TRIM, trimmed_mean
from volunteer.training.weighing import Measured, weigh


def aggregate(
    blobs: Sequence[EncodedGradient],
    listed: Sequence[ListedWork],
    num_parameters: int,
    how: Aggregation = "mean",
) -> tuple[Tensor, tuple[Outcome, ...]]:
    """Combine one commit's contributions.

    Args:
        blobs: parsed blobs in list order, of `num_parameters` elements each, on the CPU.
        listed: what the chain says of each, in the same order.
        num_parameters: P.
        how: the run's `outer.aggregation`.

    Returns:
        The aggregate, fp32, shape (P,), zeros where nothing is listed, and the outcomes.
    """
    outcomes = judge(blobs, listed)
    aggregate_P = torch.zeros(num_parameters, dtype=torch.float32)
    for start, aggregate_S in combine(blobs, outcomes, num_parameters, how):
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
    blobs: Sequence[EncodedGradient],
    outcomes: Sequence[Outcome],
    num_parameters: int,
    how: Aggregation = "mean",
) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, the aggregate's slice, fp32) in order; zeros where nothing is listed."""
    combiner = _Combiner.of(blobs, outcomes, how)

    def combine_slice(start: int, stop: int) -> tuple[int, Tensor]:
        return start, combiner.combine(start, stop)

    yield from map_slices(combine_slice, slices(num_parameters, combiner.block_elements))


def next_state_slices(
    parent: SharedState,
    blobs: Sequence[EncodedGradient],
    outcomes: Sequence[Outcome],
    outer: OuterSpec,
) -> Iterator[StateSlice]:
    """Yield the state after the commit, slice by slice in order: aggregate, then outer step.

    Args:
        parent: the state before it.
        blobs: in list order.
        outcomes: of `judge`, in the same order.
        outer: of the round (`OuterSpec.at_round`).
    """
    combiner = _Combiner.of(blobs, outcomes, outer.aggregation)

    def next_slice(start: int, stop: int) -> StateSlice:
        weights_S, momentum_S = outer_step(
            parent.weights_P[start:stop],
            parent.momentum_P[start:stop],
            combiner.combine(start, stop),
            outer,
        )
        return StateSlice(start, weights_S, momentum_S)

    cuts = slices(len(parent.weights_P), combiner.block_elements)
    yield from map_slices(next_slice, cuts)


@dataclass(frozen=True, slots=True, eq=False)
class _Combiner:
    """A commit's contributions that count, ready to be combined slice by slice in any thread.

    Invariant: only separate multiplies, adds and divisions, in list order; refused blobs are not
    touched.
    """

    blobs: Sequence[EncodedGradient]
    weights: Sequence[float]
    """Above 0; they add up to 1."""
    clip_scales: Sequence[float]
    block_elements: int
    is_trimmed: bool

    @classmethod
    def of(
        cls, blobs: Sequence[EncodedGradient], outcomes: Sequence[Outcome], how: Aggregation
    ) -> _Combiner:
        """Leave out what has no weight."""
        both = zip(blobs, outcomes, strict=True)
        counted = [(blob, one) for blob, one in both if one.weight * one.clip_scale != 0.0]
        return cls(
            blobs=[blob for blob, _ in counted],
            weights=[outcome.weight for _, outcome in counted],
            clip_scales=[outcome.clip_scale for _, outcome in counted],
            block_elements=blobs[0].block_elements if blobs else 1,
            is_trimmed=how == "trimmed_mean" and len(counted) >= MIN_FOR_TRIM,
        )

    @property
    def factors(self) -> list[float]:
        """Weight times clip scale."""
        return [w * scale for w, scale in zip(self.weights, self.clip_scales, strict=True)]

    def combine(self, start: int, stop: int) -> Tensor:
        """Return the aggregate's slice, fp32."""
        if any(isinstance(blob, TopK2Gradient) for blob in self.blobs):
            return self._combine_sparse(start, stop)
        if self.is_trimmed:
            return self._combine_trimmed(start, stop)
        return self._combine_dense(start, stop)

    def _combine_dense(self, start: int, stop: int) -> Tensor:
        decoded_S = torch.empty(stop - start, dtype=torch.float32)
        scaled_S = torch.empty(stop - start, dtype=torch.float64)
        sum_S = torch.zeros(stop - start, dtype=torch.float64)
        for blob, factor in zip(self.blobs, self.factors, strict=True):
            blob.decode_slice(start, stop, out_S=decoded_S)
            scaled_S.copy_(decoded_S)
            scaled_S.mul_(factor)
            sum_S.add_(scaled_S)
        return sum_S.to(torch.float32)

    def _combine_trimmed(self, start: int, stop: int) -> Tensor:
        """Trim each element. Cost: a slice of fp32 for each contribution."""
        scaled = []
        for blob, clip_scale in zip(self.blobs, self.clip_scales, strict=True):
            decoded_S = torch.empty(stop - start, dtype=torch.float32)
            blob.decode_slice(start, stop, out_S=decoded_S)
            if clip_scale != 1.0:
                decoded_S = decoded_S.to(torch.float64).mul_(clip_scale).to(torch.float32)
            scaled.append(decoded_S)
        return trimmed_mean(scaled, self.weights)

    def _combine_sparse(self, start: int, stop: int) -> Tensor:
        """Divide each element by the weights of those who sent it, at least 1 / sqrt(R).

        Indices are unique within a blob, so `sum_S[places] += ...` adds each once.
        """
        sum_S = np.zeros(stop - start, dtype=np.float64)
        share_S = np.zeros(stop - start, dtype=np.float64)
        for blob, weight, factor in zip(self.blobs, self.weights, self.factors, strict=True):
            assert isinstance(blob, TopK2Gradient)
            places, values = blob.kept_slice(start, stop)
            sum_S[places] += values.astype(np.float64) * factor
            share_S[places] += weight
        least = 1.0 / math.sqrt(len(self.blobs))
        np.maximum(share_S, least, out=share_S)
        sum_S /= share_S
        return torch.from_numpy(sum_S.astype(np.float32))
