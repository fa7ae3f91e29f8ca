"""The outer optimizer: one Nesterov step on the shared weights, the same on every machine.

Runs in: aggregator. Stage 5 of a round. Pure.

    m <- mu * m + q;    G <- G - lr * (q + mu * m)          q: the commit's aggregate

Paper: arXiv:2311.08105, Alg. 1, with torch.optim.SGD(nesterov=True) as the OuterOpt; q has the
pseudo-gradient's sign (theta_global - theta_local), so it is subtracted.

Invariant: only separate multiplies, adds and subtracts, in fp64, each rounded on its own, and one
cast at the end. `add(alpha=)`, `addcmul`, `lerp` and torch.optim fuse some of them on some
processors, and two members would part for ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from volunteer.run import OuterSpec


def outer_step(
    weights_P: Tensor, momentum_P: Tensor, aggregate_P: Tensor, outer: OuterSpec
) -> tuple[Tensor, Tensor]:
    """Take one outer step; elementwise, so any slice of the vectors may be given.

    Args:
        weights_P: G, fp32 (fp64 in tests), shape (P,), on the CPU; not changed.
        momentum_P: m, same shape and dtype; not changed.
        aggregate_P: q, same shape and dtype; not changed.
        outer: learning rate and momentum of the round (`OuterSpec.at_round`).

    Returns:
        The new G and m, in the dtype of the old ones. The step uses m as rounded to that dtype, so
        that it is a function of what the state file holds.

    Raises:
        ValueError: `outer` has a warm-up, so that its momentum depends on a round.

    Cost: two vectors of fp64; give slices where that is too much.
    """
    if outer.momentum_warmup_rounds:
        raise ValueError("the outer optimizer is to be that of a round")
    aggregate_64 = aggregate_P.to(torch.float64, copy=True)
    momentum_64 = momentum_P.to(torch.float64, copy=True)
    momentum_64.mul_(outer.momentum).add_(aggregate_64)
    new_momentum_P = momentum_64.to(momentum_P.dtype, copy=True)
    step_64 = momentum_64.copy_(new_momentum_P)
    step_64.mul_(outer.momentum).add_(aggregate_64).mul_(outer.lr)
    weights_64 = aggregate_64.copy_(weights_P)
    return weights_64.sub_(step_64).to(weights_P.dtype), new_momentum_P
