"""What aggregation does at the edges of a list; the numbers are test_reference_round.py's."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.volunteer.training.synthetic import encoded, gradient, make_codec, work
from volunteer.messages import Outcome
from volunteer.run import CodecSpec, OuterSpec
from volunteer.training import compression_base
from volunteer.training.aggregation import aggregate, combine, judge, next_state_slices
from volunteer.training.compression import EncodedGradient, decode, encode
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


def sparse(values: list[float]) -> EncodedGradient:
    """Return 64 elements, of which those that are not zero (8 at most) are sent."""
    codec = CodecSpec(id="topk2", block_elements=64, ladder_kept=(8,), ladder_rounds=(0,))
    return encode(torch.tensor(values + [0.0] * (64 - len(values))), codec)


def outcome(weight: float, clip_scale: float = 1.0) -> Outcome:
    return Outcome(
        contribution_id="0" * 64, weight=weight, norm=1.0, clip_scale=clip_scale, refused_reason=""
    )


def test_sparse_ones_are_divided_by_who_sent_an_element_with_a_floor() -> None:
    """Four weights; each sender's other indices are its own, so that no divisor is by chance."""
    weights, clips = [0.4, 0.3, 0.2, 0.1], [1.0, 0.5, 1.0, 1.0]
    blobs = [
        sparse([1.0] * 8),
        sparse([2.0] * 4 + [0.0] * 8 + [2.0] * 4),
        sparse([3.0] * 2 + [0.0] * 14 + [3.0] * 6),
        sparse([4.0] + [0.0] * 23 + [4.0] * 7),
    ]
    outcomes = [outcome(w, c) for w, c in zip(weights, clips, strict=True)]
    ((_, aggregate_P),) = combine(blobs, outcomes, 64)
    first, second, third, fifth = (float(aggregate_P[i]) for i in (0, 1, 2, 4))
    assert first == pytest.approx(0.4 * 1 + 0.3 * 0.5 * 2 + 0.2 * 3 + 0.1 * 4, rel=1e-6)
    assert second == pytest.approx((0.4 * 1 + 0.3 * 0.5 * 2 + 0.2 * 3) / 0.9, rel=1e-6)
    assert third == pytest.approx((0.4 * 1 + 0.3 * 0.5 * 2) / 0.7, rel=1e-6)
    assert fifth == pytest.approx(0.4 * 1 / 0.5, rel=1e-6)  # 0.4 is below 1 / sqrt(4)
    assert float(aggregate_P[24]) == pytest.approx(0.1 * 4 / 0.5, rel=1e-6)
    assert not bool(aggregate_P[31:].any())


def test_a_sparse_one_without_weight_is_no_sender() -> None:
    blobs = [sparse([1.0] * 8), sparse([5.0] * 8)]
    ((_, aggregate_P),) = combine(blobs, [outcome(1.0), outcome(0.0)], 64)
    assert torch.equal(aggregate_P, decode(blobs[0]))


def test_sparse_ones_of_two_densities_go_together() -> None:
    codec = make_codec("topk2")
    blobs = [encode(gradient(f"k{i}", P), codec, i) for i in range(3)]
    ((_, aggregate_P),) = combine(blobs, [outcome(1 / 3)] * 3, P)
    sums_P, share_P = torch.zeros(P, dtype=torch.float64), torch.zeros(P, dtype=torch.float64)
    for blob in blobs:
        sums_P += decode(blob).double() * (1 / 3)
        share_P += (decode(blob) != 0).double() * (1 / 3)
    expected_P = (sums_P / share_P.clamp(min=1 / 3**0.5)).float()
    assert torch.equal(aggregate_P, expected_P)


@pytest.mark.parametrize("codec_id", ["int4", "topk2"])
def test_threads_do_not_change_the_result(codec_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression_base, "_SLICE_ELEMENTS", 512)
    blobs = [encode(gradient(f"t{i}", P), make_codec(codec_id)) for i in range(3)]
    state = SharedState(weights_P=gradient("w", P), momentum_P=gradient("m", P))
    seen, before = [], torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            pieces = list(next_state_slices(state, blobs, [outcome(1 / 3)] * 3, OuterSpec()))
            assert [piece.start for piece in pieces] == list(range(0, P, 512))
            seen.append(torch.cat([p.weights_S for p in pieces] + [p.momentum_S for p in pieces]))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


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
