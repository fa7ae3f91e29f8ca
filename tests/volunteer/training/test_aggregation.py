"""What aggregation does at the edges of a list; the numbers are test_reference_round.py's."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.volunteer.training.synthetic import encoded, gradient, work
from volunteer.messages import Outcome
from volunteer.run import OuterSpec
from volunteer.training import compression_base
from volunteer.training.aggregation import aggregate, combine, judge, next_state_slices
from volunteer.training.compression import decode
from volunteer.training.state import SharedState

P = 2520


def test_nothing_listed_gives_zeros_and_the_momentum_goes_on() -> None:
    aggregate_P, outcomes = aggregate([], [], P)
    assert outcomes == ()
    assert aggregate_P.shape == (P,)
    assert not bool(aggregate_P.any())
    state = SharedState(weights_P=torch.zeros(P), momentum_P=torch.ones(P))
    pieces = list(next_state_slices(state, [], (), OuterSpec(lr=1.0, momentum=0.5)))
    assert torch.equal(torch.cat([piece.momentum_S for piece in pieces]), torch.full((P,), 0.5))
    assert torch.equal(torch.cat([piece.weights_S for piece in pieces]), torch.full((P,), -0.25))


def test_one_alone_is_its_own_aggregate() -> None:
    blob = encoded(gradient("alone", P))
    aggregate_P, (outcome,) = aggregate([blob], [work(0)], P)
    assert torch.equal(aggregate_P, decode(blob))
    assert outcome.weight == 1.0


def test_all_refused_gives_zeros() -> None:
    blobs = [encoded(gradient(f"r{i}", P)) for i in range(2)]
    refused = [
        Outcome(contribution_id="0" * 64, weight=0.0, norm=1.0, clip_scale=1.0, refused_reason="no")
    ] * 2
    assert all(not bool(piece_S.any()) for _, piece_S in combine(blobs, refused, P))


def test_a_refused_one_leaves_no_trace() -> None:
    blobs = [encoded(gradient("c", P) + gradient(f"n{i}", P)) for i in range(3)]
    hostile = encoded(-50 * gradient("c", P))
    listed = [work(i) for i in range(4)]
    with_it_P, outcomes = aggregate([*blobs, hostile], listed, P)
    without_it_P, _ = aggregate(blobs, listed[:3], P)
    assert outcomes[3].refused_reason
    assert torch.equal(with_it_P, without_it_P)


def test_the_order_of_the_list_is_the_order_of_the_sum() -> None:
    blobs = [encoded(gradient(f"o{i}", P, scale=7.0**i)) for i in range(4)]
    listed = [work(i) for i in range(4)]
    forward_P, _ = aggregate(blobs, listed, P)
    backward_P, _ = aggregate(blobs[::-1], listed[::-1], P)
    torch.testing.assert_close(forward_P, backward_P)
    assert torch.equal(forward_P, aggregate(blobs, listed, P)[0])


def test_slices_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = [encoded(gradient(f"s{i}", P), 17) for i in range(3)]
    listed = [work(i, tokens=1000 + i) for i in range(3)]
    whole_P, _ = aggregate(blobs, listed, P)
    monkeypatch.setattr(compression_base, "_SLICE_ELEMENTS", 40)
    sliced_P, _ = aggregate(blobs, listed, P)
    assert torch.equal(whole_P, sliced_P)


def test_doubling_all_tokens_changes_nothing() -> None:
    blobs = [encoded(gradient(f"d{i}", P)) for i in range(5)]
    listed = [work(i, tokens=1000 + 377 * i) for i in range(5)]
    doubled = [msgspec.structs.replace(item, tokens=2 * item.tokens) for item in listed]
    assert torch.equal(aggregate(blobs, listed, P)[0], aggregate(blobs, doubled, P)[0])
    assert judge(blobs, listed) == judge(blobs, doubled)


def test_a_commit_of_32_keeps_its_hostile_eighth_out() -> None:
    blobs, listed = [], []
    for i in range(32):
        x_P = gradient("common", P) + gradient(f"m{i}", P)
        blobs.append(encoded(-10 * x_P if i % 8 == 3 else x_P))
        listed.append(work(i))
    outcomes = judge(blobs, listed)
    assert [i for i, outcome in enumerate(outcomes) if outcome.refused_reason] == [3, 11, 19, 27]
