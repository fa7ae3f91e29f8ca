"""One round of DiLoCo from one volunteer's side: train, contribute, rebase.

Runs in: trainer. Stages 1, 3 and 5 of a round; read this first.

    train       theta takes inner steps on local data; nothing is exchanged
    contribute  D = P - theta, compressed with error feedback, becomes a blob; P <- theta
    rebase      the swarm's new weights G arrive: theta <- G + (theta - P); P <- G

Between contribute and rebase training goes on: what is learned while the exchange is in flight is
part of theta - P, and so of the next contribution. Contributions that the swarm passed by are put
back into theta (carrying.py) and go out again with the next one.

Paper: arXiv:2311.08105, Alg. 1. Differs: rounds are time-boxed, so the number of inner steps H is
whatever the machine managed, and the outer step (outer.py) is everyone's own (aggregator).

Every function either completes or leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from volunteer.messages import Contribute, Encoded, OwnWork, Rebase
from volunteer.run import RunSpec
from volunteer.training import carrying, pseudo_gradient
from volunteer.training.adamw import AdamState
from volunteer.training.devices import Device
from volunteer.training.finite import is_finite
from volunteer.training.inner import NotFiniteError, StepResult, take_inner_step
from volunteer.training.model import LossFunction, TrainableWeights, next_token_loss
from volunteer.training.progress import (
    Progress,
    after_contribution,
    after_discard,
    after_rebase,
    after_step,
    carried_ids,
    is_superseded,
    tokens_to_contribute,
)
from volunteer.training.pseudo_gradient import Codec, EncodedT


@dataclass(slots=True, kw_only=True)
class LocalState:
    """All that a volunteer's training consists of; a snapshot holds exactly this.

    Vectors have shape (P,); fp32 in use, fp64 in tests.
    """

    weights: TrainableWeights
    """theta, on the device."""
    adam: AdamState
    """Moments of the inner optimizer, on the device; kept across rounds, never communicated."""
    base_P: Tensor
    """P, on the CPU: what the next pseudo-gradient is measured from."""
    residual_P: Tensor
    """E, on the CPU: what the codec could not express yet."""
    progress: Progress

    @property
    def theta_P(self) -> Tensor:
        """The local weights on the CPU: a copy, unless they are there."""
        return self.weights.weights_P.cpu()


def fresh_state(shared_P: Tensor, spec: RunSpec, device: Device) -> LocalState:
    """Return the state of a volunteer that starts from shared weights: theta = P = G, E = 0.

    Args:
        shared_P: G, on the CPU; not kept.
        spec: the run.
        device: where theta will live.
    """
    theta_P = shared_P.to(device.torch_device, copy=True)
    return LocalState(
        weights=TrainableWeights(theta_P, spec.model),
        adam=AdamState.zeros_like(theta_P),
        base_P=shared_P.clone(),
        residual_P=torch.zeros_like(shared_P),
        progress=Progress(),
    )


def train(
    state: LocalState,
    windows_BT1: Tensor,
    spec: RunSpec,
    *,
    micro_batch_sequences: int,
    device: Device,
    should_stop: Callable[[], bool],
    loss_function: LossFunction = next_token_loss,
) -> StepResult | None:
    """Take one inner step.

    Args:
        state: changed in place.
        windows_BT1: int64, shape (B, context_tokens + 1), on the device.
        spec: the run.
        micro_batch_sequences: sequences per backward pass.
        device: where theta lives.
        should_stop: asked before each micro-batch.
        loss_function: of a micro-batch: `next_token_loss`, or what computes the same.

    Returns:
        None if told to stop; the state is then as before.

    Raises:
        NotFiniteError: loss or gradient is not finite; the state is as before.
    """
    result = take_inner_step(
        state.weights,
        state.adam,
        windows_BT1,
        spec.model,
        spec.inner,
        inner_step=state.progress.inner_step,
        round_index=state.progress.round_index,
        micro_batch_sequences=micro_batch_sequences,
        device=device,
        should_stop=should_stop,
        loss_function=loss_function,
    )
    if result is not None:
        num_tokens = windows_BT1.shape[0] * (windows_BT1.shape[1] - 1)
        state.progress = after_step(state.progress, num_tokens=num_tokens)
    return result


def contribute(
    state: LocalState,
    command: Contribute,
    spec: RunSpec,
    *,
    codec: Codec[EncodedT],
    store_blob: Callable[[EncodedT], tuple[str, int]],
) -> Encoded | None:
    """Turn the work since the last contribution into a blob.

    Args:
        state: changed in place; the caller puts it on disk before anyone hears of the result.
        command: what the contribution is for.
        spec: the run.
        codec: how pseudo-gradients are compressed.
        store_blob: puts a blob on disk for good and returns its (blob_id, size_bytes).

    Returns:
        None if no inner step was taken since the last contribution.

    Raises:
        NotFiniteError: the weights are broken.
        ContributionRejectedError: the weights have run away beyond the codec's range.

    Cost: about five vectors of P elements on the CPU at the peak.
    """
    if state.progress.tokens_since_contribution == 0:
        return None
    verify_finite(state)
    theta_P = state.theta_P
    contributed = pseudo_gradient.contribute(theta_P, state.base_P, state.residual_P, codec)
    blob_id, blob_bytes = store_blob(contributed.encoded)
    encoded = Encoded(
        base=command.base,
        round_index=command.round_index,
        blob_id=blob_id,
        blob_bytes=blob_bytes,
        codec=spec.codec.id,
        codec_version=spec.codec.version,
        tokens=tokens_to_contribute(state.progress),
        carries=carried_ids(state.progress),
    )
    state.base_P.copy_(theta_P)
    state.residual_P = contributed.residual_P
    state.progress = after_contribution(state.progress, encoded)
    return encoded


def rebase(
    state: LocalState,
    command: Rebase,
    shared_P: Tensor,
    *,
    load_quantised: Callable[[OwnWork], Tensor],
) -> int:
    """Stand on the swarm's weights, keep what was learned since, and carry what is pending.

    Args:
        state: changed in place.
        command: the commit, and what of our own work it leaves pending.
        shared_P: G, the commit's shared weights, on the CPU; not changed.
        load_quantised: returns Q of an own contribution, its decoded blob, on the CPU.

    Returns:
        The tokens given up because the state is older than a contribution that was sent; else 0.

    Raises:
        TrainerError: `works` lacks a contribution that is needed.
    """
    progress, residual_P = state.progress, state.residual_P
    if _is_plain_move(progress, command):
        theta_P = state.theta_P
        pseudo_gradient.rebase_in_place(theta_P, state.base_P, shared_P)
        state.weights.weights_P.copy_(theta_P)
        works = {work.contribution_id: work for work in progress.carried}
        state.progress = after_rebase(progress, command, works)
        return 0
    discarded_tokens = 0
    if is_superseded(progress, command.known_contributions):
        discarded_tokens = progress.tokens_since_contribution
        progress = after_discard(progress, command.known_contributions)
        theta_P, base_P = shared_P.clone(), shared_P.clone()
        residual_P = torch.zeros_like(residual_P)
    elif command.commit_id == progress.base_commit:
        # It stands there already, perhaps with a contribution in flight: P must stay where that was
        # made. Only what is carried may have changed.
        theta_P, base_P = state.theta_P, state.base_P
    else:
        theta_P, base_P = pseudo_gradient.rebase(state.theta_P, state.base_P, shared_P)
    works = {work.contribution_id: work for work in (*progress.carried, *command.works)}
    theta_P = carrying.carry(
        theta_P,
        in_theta=frozenset(carried_ids(progress)),
        pending=frozenset(command.pending),
        works=works,
        load_quantised=load_quantised,
    )
    state.weights.weights_P.copy_(theta_P)
    state.progress = after_rebase(progress, command, works)
    state.base_P = base_P
    state.residual_P = residual_P
    return discarded_tokens


def _is_plain_move(progress: Progress, command: Rebase) -> bool:
    """Tell whether nothing but the shared weights changes, as after nearly every commit."""
    return (
        progress.base_commit != command.commit_id
        and frozenset(carried_ids(progress)) == frozenset(command.pending)
        and not is_superseded(progress, command.known_contributions)
    )


def verify_finite(state: LocalState) -> None:
    """Check that the local weights are numbers.

    Raises:
        NotFiniteError: they are not.
    """
    if not is_finite(state.weights.weights_P):
        raise NotFiniteError("the local weights hold infinities or not-a-numbers")
