"""The books in vectors: every trained step is exactly one of listed, in flight, pending, dropped.

Acceptance test 5 of ALGORITHMS.md over random schedules (ROUNDS.md 27-29), in float64.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from tests.volunteer.training.books import Member, RoundingCodec, run_schedule
from volunteer.errors import TrainerError
from volunteer.messages import OwnWork
from volunteer.run import CodecSpec
from volunteer.training import compression
from volunteer.training.carrying import carry, carry_difference, new_part
from volunteer.training.pseudo_gradient import Codec

NUM_SCHEDULES = 200
MUST_MEET = (
    "switch",
    "back to an ancestor",
    "advance",
    "restart",
    "late",
    "carrying",
    "taken out",
    "drop",
)


class BlobAsTensor:
    """A real codec, with the decoded vector in the place of the blob."""

    error_feedback_beta = 1.0

    def __init__(self, codec: CodecSpec) -> None:
        self._codec = codec

    def encode(self, x_P: Tensor) -> Tensor:
        blob = compression.encode(x_P, self._codec)
        return compression.decode(blob).double()

    def decode(self, encoded: Tensor) -> Tensor:
        return encoded.clone()

    def subtract_decoded(self, encoded: Tensor, x_P: Tensor) -> None:
        x_P -= self.decode(encoded)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "codec",
    [
        RoundingCodec(),
        BlobAsTensor(CodecSpec(id="int4", block_elements=16)),
        BlobAsTensor(
            CodecSpec(id="topk2", block_elements=32, ladder_kept=(8,), ladder_rounds=(0,))
        ),
    ],
    ids=["rounding", "int4", "topk2"],
)
def test_the_ledger_closes_over_random_schedules(codec: Codec[Tensor]) -> None:
    met: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        member = Member(seed, codec)
        ledger_gap, chain_gap = run_schedule(member)
        assert ledger_gap < 1e-12, f"seed {seed}"
        assert chain_gap < 1e-10, f"seed {seed}"
        met.update(member.counts)
    for name in MUST_MEET:
        assert met[name] >= 50, f"the schedules hardly met {name!r}: {met}"


def closure(member: Member) -> frozenset[str]:
    own, todo, found = member.own, list(member.local.in_theta), set[str]()
    while todo:
        contribution_id = todo.pop()
        found.add(contribution_id)
        todo += own[contribution_id].carries
    return frozenset(found)


def nothing(_member: Member) -> frozenset[str]:
    return frozenset()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("carries_of", [closure, nothing])
def test_the_audit_notices_carries_that_are_not_what_theta_holds(
    carries_of: object,
) -> None:
    """A control: naming more than theta holds loses work, naming less sends it twice."""
    gaps = [
        max(run_schedule(Member(seed, RoundingCodec(), carries_of)))  # type: ignore[arg-type]
        for seed in range(40)
    ]
    assert max(gaps) > 0.1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_audit_notices_that_work_above_the_tip_is_in_flight() -> None:
    """A control: carrying what was made on a descendant of the tip can put it on a chain twice."""
    gaps = [
        run_schedule(Member(seed, RoundingCodec(), knows_descendants=False))[1]
        for seed in range(NUM_SCHEDULES)
    ]
    assert max(gaps) > 0.1


WORKS = {
    "a": OwnWork(contribution_id="a", blob_id="a", carries=()),
    "b": OwnWork(contribution_id="b", blob_id="b", carries=("a",)),
    "c": OwnWork(contribution_id="c", blob_id="c", carries=("a", "b")),
    "d": OwnWork(contribution_id="d", blob_id="d", carries=("b",)),
}


def load(own_work: OwnWork) -> Tensor:
    return torch.tensor([{"a": 1.0, "b": 11.0, "c": 111.0, "d": 1010.0}[own_work.contribution_id]])


@pytest.mark.parametrize(("work_id", "expected"), [("a", 1), ("b", 10), ("c", 100), ("d", 1000)])
def test_the_new_part_is_what_no_carried_one_held(work_id: str, expected: float) -> None:
    # d carries b alone: the chain listed a meanwhile.
    assert new_part(work_id, WORKS, load).tolist() == [expected]


def test_only_differences_are_applied_and_each_blob_is_loaded_once() -> None:
    loaded: list[str] = []

    def load_counted(own_work: OwnWork) -> Tensor:
        loaded.append(own_work.contribution_id)
        return load(own_work)

    in_theta, pending = frozenset({"a", "b"}), frozenset({"b", "c", "d"})
    assert carry_difference(in_theta, pending) == (("c", "d"), ("a",))
    theta_P = carry(torch.tensor([0.0]), in_theta, pending, WORKS, load_counted)
    assert theta_P.tolist() == [-100 - 1000 + 1]
    assert sorted(loaded) == sorted(set(loaded))
    loaded.clear()
    assert carry(theta_P, pending, pending, WORKS, load_counted) is theta_P
    assert loaded == []


def test_what_is_put_in_and_taken_out_again_leaves_nothing() -> None:
    theta_P = torch.tensor([0.5], dtype=torch.float64)
    carried_P = carry(theta_P, frozenset(), frozenset({"c"}), WORKS, load)
    back_P = carry(carried_P, frozenset({"c"}), frozenset(), WORKS, load)
    assert carried_P.dtype == torch.float64
    assert torch.equal(back_P, theta_P)


def test_books_that_contradict_themselves_are_an_error() -> None:
    with pytest.raises(TrainerError, match="do not know"):
        new_part("x", WORKS, load)
    with pytest.raises(TrainerError, match="do not know"):
        carry(torch.zeros(1), frozenset({"gone"}), frozenset(), WORKS, load)
    circle = {
        "a": OwnWork(contribution_id="a", blob_id="a", carries=("b",)),
        "b": OwnWork(contribution_id="b", blob_id="b", carries=("a",)),
    }
    with pytest.raises(TrainerError, match="carries itself"):
        new_part("a", circle, load)
