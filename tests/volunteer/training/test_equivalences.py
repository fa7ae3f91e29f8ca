"""What DiLoCo must reduce to: acceptance tests 1, 2 and 5, with the very functions in use.

fp64 and a codec that loses nothing, so that only bookkeeping could make a difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.volunteer.training.tiny_run import CPU, never, tiny_spec, tiny_weights_P, tiny_windows
from volunteer.messages import Contribute, OwnWork, Rebase
from volunteer.run import OuterSpec
from volunteer.training import diloco
from volunteer.training.diloco import LocalState
from volunteer.training.outer import outer_step

SPEC = tiny_spec()
PLAIN = OuterSpec(lr=1.0, momentum=0.0)


class LosslessCodec:
    """Sends the vector itself."""

    error_feedback_beta = 1.0

    def encode(self, x_P: Tensor) -> Tensor:
        return x_P.clone()

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.clone()

    def subtract_decoded(self, encoded: Tensor, x_P: Tensor) -> None:
        x_P -= self.decode(encoded)


class HalvingCodec:
    """Loses half of everything, so that error feedback has work to do."""

    error_feedback_beta = 1.0

    def encode(self, x_P: Tensor) -> Tensor:
        return x_P * 0.5

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.clone()

    def subtract_decoded(self, encoded: Tensor, x_P: Tensor) -> None:
        x_P -= self.decode(encoded)


def start() -> LocalState:
    return diloco.fresh_state(tiny_weights_P(SPEC, torch.float64), SPEC, CPU)


def train(state: LocalState, num_steps: int, peer_seed: bytes = b"seed") -> None:
    for _ in range(num_steps):
        result = diloco.train(
            state,
            tiny_windows(SPEC, state.progress.inner_step, peer_seed),
            SPEC,
            micro_batch_sequences=4,
            device=CPU,
            should_stop=never,
        )
        assert result is not None


def contribute(state: LocalState, codec: LosslessCodec | HalvingCodec) -> Tensor:
    """Return Q."""
    sent: list[Tensor] = []

    def store(encoded: Tensor) -> tuple[str, int]:
        sent.append(encoded)
        return f"{len(state.progress.own_blobs):064x}", 1

    encoded = diloco.contribute(
        state, Contribute(base="c", round_index=0), SPEC, codec=codec, store_blob=store
    )
    assert encoded is not None
    return codec.decode(sent[0])


_commits = itertools.count()


def rebase(
    state: LocalState,
    shared_P: Tensor,
    pending: tuple[OwnWork, ...] = (),
    load: Callable[[OwnWork], Tensor] | None = None,
    commit_id: str | None = None,
) -> None:
    command = Rebase(
        commit_id=commit_id or f"c{next(_commits)}",
        round_index=0,
        state_hash="",
        pending=tuple(work.contribution_id for work in pending),
        works=pending,
        known_contributions=(),
    )
    diloco.rebase(state, command, shared_P, load_quantised=load or (lambda _: torch.empty(0)))


@pytest.mark.parametrize("overlap_steps", [0, 1, 3])
def test_one_volunteer_with_a_plain_outer_step_is_plain_adamw(overlap_steps: int) -> None:
    """Also with steps taken while the exchange is in flight."""
    alone = start()
    member, shared_P = start(), tiny_weights_P(SPEC, torch.float64)
    momentum_P = torch.zeros_like(shared_P)
    for _ in range(3):
        train(alone, 5)
        train(member, 5 - overlap_steps)
        aggregate_P = contribute(member, LosslessCodec())
        train(member, overlap_steps)
        shared_P, momentum_P = outer_step(shared_P, momentum_P, aggregate_P, PLAIN)
        rebase(member, shared_P)
    torch.testing.assert_close(member.theta_P, alone.theta_P, rtol=0, atol=1e-12)
    assert not torch.equal(alone.theta_P, tiny_weights_P(SPEC, torch.float64))


def test_three_volunteers_on_identical_data_are_one() -> None:
    results = []
    for num_volunteers in (1, 3):
        shared_P = tiny_weights_P(SPEC, torch.float64)
        momentum_P = torch.zeros_like(shared_P)
        members = [start() for _ in range(num_volunteers)]
        for _ in range(3):
            parts = []
            for member in members:
                train(member, 3)
                parts.append(contribute(member, LosslessCodec()))
            aggregate_P = torch.stack(parts).sum(0) / num_volunteers
            shared_P, momentum_P = outer_step(shared_P, momentum_P, aggregate_P, OuterSpec())
            for member in members:
                rebase(member, shared_P)
        results.append(shared_P)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-12)


def test_other_data_gives_other_weights() -> None:
    """The control: the equalities above are not equalities of everything."""
    one, other = start(), start()
    train(one, 3)
    train(other, 3, peer_seed=b"other")
    assert float((one.theta_P - other.theta_P).abs().max()) > 1e-4


def test_what_the_codec_loses_is_sent_later() -> None:
    """Sum of sent + residual == all displacement."""
    member, sent_P = start(), torch.zeros_like(tiny_weights_P(SPEC, torch.float64))
    for _ in range(4):
        train(member, 2)
        sent_P += contribute(member, HalvingCodec())
    displacement_P = tiny_weights_P(SPEC, torch.float64) - member.theta_P
    torch.testing.assert_close(sent_P + member.residual_P, displacement_P, rtol=0, atol=1e-12)
    assert float(member.residual_P.abs().max()) > 0


def test_work_that_was_passed_by_is_carried_and_then_arrives_once() -> None:
    """A refused contribution that is carried and sent again equals one never refused."""
    alone = start()
    train(alone, 6)
    member, shared_P = start(), tiny_weights_P(SPEC, torch.float64)
    train(member, 3)
    refused_P = contribute(member, LosslessCodec())
    blob_id = member.progress.own_blobs[-1].blob_id
    work = OwnWork(contribution_id="c1", blob_id=blob_id, carries=())
    # The commit listed nobody: the shared weights stay, and c1 becomes pending.
    rebase(member, shared_P, (work,), lambda _: refused_P)
    train(member, 3)
    resent_P = contribute(member, LosslessCodec())
    assert member.progress.carried == ()
    last = member.progress.last_contribution
    assert last is not None
    assert last.carries == ("c1",)
    assert last.tokens == member.progress.tokens_total
    torch.testing.assert_close(shared_P - resent_P, alone.theta_P, rtol=0, atol=1e-12)


def test_carried_work_is_taken_out_when_the_chain_lists_it_after_all() -> None:
    member, shared_P = start(), tiny_weights_P(SPEC, torch.float64)
    train(member, 3)
    first_P = contribute(member, LosslessCodec())
    train(member, 2)
    work = OwnWork(contribution_id="c1", blob_id="b1", carries=())
    expected_P = (shared_P - first_P) + (member.theta_P - member.base_P)
    rebase(member, shared_P, (work,), lambda _: first_P)
    # Another branch lists c1: its work is in the shared weights, and out of the local ones.
    rebase(member, shared_P - first_P, (), lambda _: first_P)
    torch.testing.assert_close(member.theta_P, expected_P, rtol=0, atol=1e-12)


def test_standing_on_the_same_commit_again_changes_only_what_is_carried() -> None:
    """What was contributed there is in flight: its displacement must stay in the weights."""
    member, shared_P = start(), tiny_weights_P(SPEC, torch.float64)
    rebase(member, shared_P, commit_id="here")
    train(member, 3)
    contribute(member, LosslessCodec())
    train(member, 2)
    theta_P, base_P = member.theta_P.clone(), member.base_P.clone()
    rebase(member, shared_P, commit_id="here")
    assert torch.equal(member.theta_P, theta_P)
    assert torch.equal(member.base_P, base_P)
    older_P = torch.ones_like(theta_P)
    work = OwnWork(contribution_id="c0", blob_id="b0", carries=())
    rebase(member, shared_P, (work,), lambda _: older_P, commit_id="here")
    torch.testing.assert_close(member.theta_P, theta_P - older_P, rtol=0, atol=1e-12)
    assert torch.equal(member.base_P, base_P)
