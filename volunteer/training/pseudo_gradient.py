"""What a member has learned since its last contribution, and how it is sent without losing any.

Runs in: trainer. Stages 3 and 5 of a round. Pure.

A member keeps one moving base P (what its next pseudo-gradient is measured from) and its error
feedback E (what the codec could not express). DESIGN.md section 3:

    contribute:  D = P - theta;  X = D + beta * E;  Q = decode(encode(X));  E <- X - Q;  P <- theta
    apply:       theta <- G + (theta - P);  P <- G

so that the steps taken while an exchange was in flight are part of the next D.
Paper: arXiv:2311.08105, Alg. 1, for D. Differs: P moves with every contribution and every apply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from volunteer.run import CodecSpec
from volunteer.training import compression
from volunteer.training.compression import EncodedGradient
from volunteer.training.slice_threads import run_slices

EncodedT = TypeVar("EncodedT")


class Codec(Protocol[EncodedT]):
    """A lossy compression. Tests put simpler ones in the place of `RunCodec`."""

    @property
    def error_feedback_beta(self) -> float:
        """How much of the error feedback goes into the next contribution, 0..1."""

    def encode(self, x_P: Tensor) -> EncodedT:
        """Compress `x_P`, shape (P,), any float dtype."""

    def decode(self, encoded: EncodedT) -> Tensor:
        """Return the decoded vector, shape (P,)."""

    def subtract_decoded(self, encoded: EncodedT, x_P: Tensor) -> None:
        """Subtract the decoded vector from `x_P`, any float dtype, in place."""


@dataclass(frozen=True, slots=True)
class RunCodec:
    """The codec that a RunSpec names (compression.py), as it is in one round."""

    spec: CodecSpec
    round_index: int
    """Of the contribution: how dense a sparse codec is depends on it."""

    @property
    def error_feedback_beta(self) -> float:
        """As the RunSpec says."""
        return self.spec.error_feedback_beta

    def encode(self, x_P: Tensor) -> EncodedGradient:
        """Compress (`compression.encode`)."""
        return compression.encode(x_P, self.spec, self.round_index)

    def decode(self, encoded: EncodedGradient) -> Tensor:
        """Decode (`compression.decode`)."""
        return compression.decode(encoded)

    def subtract_decoded(self, encoded: EncodedGradient, x_P: Tensor) -> None:
        """Subtract it (`compression.subtract_decoded`)."""
        compression.subtract_decoded(encoded, x_P)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contributed(Generic[EncodedT]):
    """One contribution, before it is signed."""

    encoded: EncodedT
    codec: Codec[EncodedT]
    residual_P: Tensor
    """The new error feedback."""

    @property
    def quantised_P(self) -> Tensor:
        """Q: what every member will decode, in theta's dtype."""
        return self.codec.decode(self.encoded).to(self.residual_P.dtype)


def contribute(
    theta_P: Tensor, base_P: Tensor, residual_P: Tensor, codec: Codec[EncodedT]
) -> Contributed[EncodedT]:
    """Encode the work since the last contribution; the caller then moves its base: P <- theta.

    Args:
        theta_P: local weights, shape (P,), fp32 (fp64 in tests); not changed.
        base_P: P, same shape and dtype; not changed.
        residual_P: E, same shape and dtype; not changed.
        codec: the run's codec.

    Raises:
        ContributionRejectedError: the weights have run away (not finite, or beyond the codec).

    Cost: one vector of P elements, and what is encoded. Each page of a new vector costs as much as
    the sums that fill it.
    """
    corrected_P = torch.empty_like(residual_P)

    def correct_slice(start: int, stop: int) -> None:
        piece = slice(start, stop)
        corrected_S = corrected_P[piece].copy_(residual_P[piece])
        corrected_S *= codec.error_feedback_beta
        corrected_S += base_P[piece] - theta_P[piece]

    run_slices(correct_slice, compression.slices(len(corrected_P), 1))
    encoded = codec.encode(corrected_P)
    codec.subtract_decoded(encoded, corrected_P)
    return Contributed(encoded=encoded, codec=codec, residual_P=corrected_P)


def rebase(theta_P: Tensor, base_P: Tensor, weights_P: Tensor) -> tuple[Tensor, Tensor]:
    """Stand on the shared weights G and keep the displacement from the old base.

    Args:
        theta_P: local weights, shape (P,); not changed.
        base_P: P, what the displacement is measured from; not changed.
        weights_P: G, same shape, dtype and device; not changed.

    Returns:
        theta' = G + (theta - P) and P' = G, both new tensors.
    """
    moved_P, new_base_P = theta_P.clone(), base_P.clone()
    rebase_in_place(moved_P, new_base_P, weights_P)
    return moved_P, new_base_P


def rebase_in_place(theta_P: Tensor, base_P: Tensor, weights_P: Tensor) -> None:
    """Do what `rebase` does to the vectors themselves: three new ones cost as much as the sums.

    Args:
        theta_P: becomes G + (theta - P).
        base_P: becomes G.
        weights_P: G; not changed.
    """
    theta_P -= base_P
    theta_P += weights_P
    base_P.copy_(weights_P)
