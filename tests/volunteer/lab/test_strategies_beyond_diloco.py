"""What each strategy must reduce to, and its pure step against a reference written out here."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.volunteer.lab.tiny import two_layer_task
from volunteer.errors import ConfigError
from volunteer.lab.training.strategies.asynchronous import (
    AsyncPlan,
    DelayedState,
    delayed_nesterov_step,
    dynamic_steps,
    next_arrivals,
)
from volunteer.lab.training.strategies.diloco import DiLoCoPlan
from volunteer.lab.training.strategies.eager import EagerPlan, eager_gradient
from volunteer.lab.training.strategies.noloco import (
    NolocoPlan,
    NolocoSpec,
    draw_pairs,
    noloco_step,
    relative_spread,
)
from volunteer.lab.training.strategies.overlap import DelayedPlan, OverlapPlan
from volunteer.lab.training.strategies.streaming import (
    StreamingPlan,
    covers,
    cut_fragments,
    mixed,
    put,
    sent_at,
    take,
)
from volunteer.lab.training.strategy import Plan, RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.run import CodecSpec, ModelSpec, OuterSpec
from volunteer.training.layout import num_parameters
from volunteer.training.outer import outer_step

H = 4
NUM_ROUNDS = 3
NESTEROV = OuterSpec(lr=0.7, momentum=0.9)


@pytest.fixture(scope="module")
def task() -> LabTask:
    return two_layer_task(H * NUM_ROUNDS)


def weights_after(
    plan: Plan, task: LabTask, *, num_rounds: int = NUM_ROUNDS, seed: int = 1
) -> Tensor:
    return run(plan, task, num_rounds=num_rounds, seed=seed)[0]


def run(
    plan: Plan, task: LabTask, *, num_rounds: int = NUM_ROUNDS, seed: int = 1
) -> tuple[Tensor, list[RoundReport]]:
    strategy = plan.begin(task, seed)
    reports = [strategy.advance() for _ in range(num_rounds)]
    return strategy.weights(), reports


def diloco(num_workers: int, codec: CodecSpec | None = None) -> DiLoCoPlan:
    return DiLoCoPlan(
        num_workers=num_workers,
        steps_a_round=H,
        outer=NESTEROV,
        codec=codec or CodecSpec(id="fp32"),
    )


# --- What they reduce to


def test_no_overlap_is_diloco_to_the_last_bit(task: LabTask) -> None:
    plan = OverlapPlan(num_workers=3, steps_a_round=H, overlap_steps=0, outer=NESTEROV)
    assert torch.equal(weights_after(plan, task), weights_after(diloco(3), task))


def test_an_overlap_takes_the_same_windows_and_ends_elsewhere(task: LabTask) -> None:
    plan = OverlapPlan(num_workers=2, steps_a_round=H, overlap_steps=1, outer=NESTEROV)
    weights_P, reports = run(plan, task)
    reference_P, reference = run(diloco(2), task)
    assert [r.num_tokens for r in reports] == [r.num_tokens for r in reference]
    assert [r.bytes_sent for r in reports] == [r.bytes_sent for r in reference]
    assert not torch.equal(weights_P, reference_P)


def test_an_overlap_changes_nothing_before_the_first_commit_arrives(task: LabTask) -> None:
    plan = OverlapPlan(num_workers=2, steps_a_round=H, overlap_steps=H, outer=NESTEROV)
    one = weights_after(plan, task, num_rounds=1)
    assert torch.equal(one, weights_after(diloco(2), task, num_rounds=1))


def test_one_worker_alone_with_a_plain_outer_step_overlaps_without_a_trace(task: LabTask) -> None:
    """G + (theta - P) is then theta itself: nobody else moved G."""
    plain = OuterSpec(lr=1.0, momentum=0.0)
    plan = OverlapPlan(num_workers=1, steps_a_round=H, overlap_steps=2, outer=plain)
    waits = DiLoCoPlan(num_workers=1, steps_a_round=H, outer=plain)
    torch.testing.assert_close(
        weights_after(plan, task), weights_after(waits, task), rtol=0, atol=1e-6
    )


def test_what_is_a_round_late_begins_the_second_round_where_the_first_began(task: LabTask) -> None:
    """Two rounds from the genesis state: their work is all there, at the same place."""
    plan = DelayedPlan(num_workers=1, steps_a_round=H, outer=OuterSpec(lr=1.0, momentum=0.0))
    strategy = plan.begin(task, 1)
    genesis_P = strategy.weights().clone()
    strategy.advance()
    first_P = strategy.weights().clone()
    strategy.advance()
    second_P = strategy.weights()
    waits = DiLoCoPlan(num_workers=1, steps_a_round=H, outer=OuterSpec(lr=1.0, momentum=0.0))
    assert torch.equal(first_P, weights_after(waits, task, num_rounds=1))
    own_P, expected_P = first_P - second_P, genesis_P - first_P
    # Adam's moments differ by a round, the place does not: the two displacements point alike.
    assert float(torch.cosine_similarity(own_P, expected_P, dim=0)) > 0.3
    assert not torch.equal(second_P, weights_after(waits, task, num_rounds=2))


def test_eager_updates_of_one_worker_are_diloco(task: LabTask) -> None:
    plan = EagerPlan(num_workers=1, steps_a_round=H, outer=NESTEROV)
    assert torch.equal(weights_after(plan, task), weights_after(diloco(1), task))


@pytest.mark.parametrize("codec_id", ["fp32", "int4"])
def test_streaming_one_fragment_without_delay_is_diloco(task: LabTask, codec_id: str) -> None:
    codec = CodecSpec(id=codec_id)
    plan = StreamingPlan(
        num_workers=3, steps_a_round=H, num_fragments=1, alpha=0.0, outer=NESTEROV, codec=codec
    )
    weights_P, reports = run(plan, task)
    reference_P, reference = run(diloco(3, codec), task)
    assert torch.equal(weights_P, reference_P)
    assert [r.bytes_sent for r in reports] == [r.bytes_sent for r in reference]


@pytest.mark.slow
def test_equal_speeds_and_n_equal_to_k_make_delayed_nesterov_diloco(task: LabTask) -> None:
    plan = AsyncPlan(speeds=(2.0,) * 3, steps_a_round=H, outer=NESTEROV)
    weights_P, reports = run(plan, task)
    torch.testing.assert_close(weights_P, weights_after(diloco(3), task), rtol=0, atol=1e-5)
    assert [report.num_steps for report in reports] == [H] * NUM_ROUNDS


def test_noloco_of_one_worker_is_heavy_ball(task: LabTask) -> None:
    """No pair, nothing to be pulled to: m = alpha m + beta D, phi = phi - m."""
    plan = NolocoPlan(num_workers=1, steps_a_round=H, noloco=NolocoSpec(alpha=0.0, beta=1.0))
    averages = DiLoCoPlan(num_workers=1, steps_a_round=H, outer=OuterSpec(lr=1.0, momentum=0.0))
    torch.testing.assert_close(
        weights_after(plan, task), weights_after(averages, task), rtol=0, atol=1e-6
    )


def all_plans() -> list[Plan]:
    return [
        OverlapPlan(num_workers=2, steps_a_round=H, overlap_steps=1),
        DelayedPlan(num_workers=2, steps_a_round=H),
        EagerPlan(num_workers=2, steps_a_round=H),
        StreamingPlan(num_workers=2, steps_a_round=H, num_fragments=2, delay_steps=1),
        NolocoPlan(num_workers=3, steps_a_round=H),
        AsyncPlan(speeds=(1.0, 0.4), steps_a_round=H, grace=0.5),
        AsyncPlan(speeds=(1.0, 0.4), steps_a_round=H, rule="naive", is_dynamic=False),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("plan", all_plans(), ids=lambda plan: type(plan).__name__)
def test_the_same_seed_gives_the_same_numbers_and_another_others(task: LabTask, plan: Plan) -> None:
    (first_P, first), (second_P, second) = run(plan, task), run(plan, task)
    assert torch.equal(first_P, second_P)
    assert first == second
    assert not torch.equal(first_P, weights_after(plan, task, seed=2))


@pytest.mark.parametrize("plan", all_plans(), ids=lambda plan: type(plan).__name__)
def test_every_strategy_ends_at_the_length_of_its_task(task: LabTask, plan: Plan) -> None:
    strategy, num_steps = plan.begin(task, 1), 0
    while num_steps < task.num_steps:
        report = strategy.advance()
        num_steps += report.num_steps
        assert report.num_tokens > 0
        assert report.bytes_sent > 0
    assert num_steps == task.num_steps


# --- NoLoCo


def test_pairs_cover_everyone_once_and_change_from_round_to_round() -> None:
    for num_workers in (1, 2, 5, 8):
        for round_index in range(3):
            pairs = draw_pairs(num_workers, seed=4, round_index=round_index)
            assert sorted(i for pair in pairs for i in pair) == list(range(num_workers))
            assert sum(len(pair) == 1 for pair in pairs) == num_workers % 2
    assert len({draw_pairs(8, seed=4, round_index=r) for r in range(5)}) > 1
    assert draw_pairs(8, seed=4, round_index=1) != draw_pairs(8, seed=5, round_index=1)


def test_a_pair_of_equal_replicas_stays_equal_and_is_not_pulled() -> None:
    slow_P, momentum_P = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -0.5])
    gradient_P = torch.tensor([0.1, 0.2])
    noloco = NolocoSpec(alpha=0.5, beta=0.7, gamma=0.9)
    new_P, new_momentum_P = noloco_step(slow_P, momentum_P, gradient_P, slow_P, noloco)
    torch.testing.assert_close(new_momentum_P, 0.5 * momentum_P + 0.7 * gradient_P)
    torch.testing.assert_close(new_P, slow_P - new_momentum_P)


def test_the_pull_brings_replicas_towards_each_other() -> None:
    one_P, other_P = torch.zeros(3), torch.ones(3)
    zero_P, mean_P = torch.zeros(3), torch.full((3,), 0.5)
    moved = [
        noloco_step(slow_P, zero_P, zero_P, mean_P, NolocoSpec())[0] for slow_P in (one_P, other_P)
    ]
    assert relative_spread(moved) < relative_spread([one_P, other_P])
    torch.testing.assert_close(moved[0] + moved[1], one_P + other_P)


# --- Streaming


@pytest.mark.parametrize("num_fragments", [1, 2, 3, 5])
def test_fragments_cover_the_model_once_and_are_strided(num_fragments: int) -> None:
    model = ModelSpec(num_layers=5, dim=16, num_heads=2, ffn_dim=16, context_tokens=8)
    fragments = cut_fragments(model, num_fragments)
    assert len(fragments) == num_fragments
    assert covers(fragments, num_parameters(model))
    assert all(fragments)


def test_there_are_no_more_fragments_than_layers() -> None:
    model = ModelSpec(num_layers=2, dim=16, num_heads=2, ffn_dim=16, context_tokens=8)
    with pytest.raises(ConfigError):
        cut_fragments(model, 3)
    with pytest.raises(ConfigError):
        StreamingPlan(num_workers=2, steps_a_round=4, num_fragments=2, delay_steps=4)


def test_a_fragment_is_put_back_where_it_was_taken() -> None:
    vector_P, ranges = torch.arange(10.0), ((1, 3), (6, 9))
    fragment_S = take(vector_P, ranges)
    assert fragment_S.tolist() == [1.0, 2.0, 6.0, 7.0, 8.0]
    target_P = torch.zeros(10)
    put(target_P, ranges, fragment_S)
    assert target_P.tolist() == [0, 1, 2, 0, 0, 0, 6, 7, 8, 0]


def test_every_fragment_is_sent_once_a_round_and_the_last_one_at_its_end() -> None:
    sent = [(s, p) for s in range(25) for p in range(3) if sent_at(s, p, 3, 12)]
    assert sent == [(4, 0), (8, 1), (12, 2), (16, 0), (20, 1), (24, 2)]


def test_mixing_is_between_local_and_shared() -> None:
    local_S, shared_S = torch.tensor([1.0]), torch.tensor([3.0])
    assert [float(mixed(local_S, shared_S, a)) for a in (0.0, 0.25, 1.0)] == [3.0, 2.5, 1.0]


# --- Eager updates


def test_the_eager_gradient_is_ones_own_fresh_work_and_the_others_stale() -> None:
    fresh, stale = torch.randn(3, 4), torch.randn(3, 4)
    for i in range(3):
        others = sum((stale[j] for j in range(3) if j != i), torch.zeros(4))
        expected = (fresh[i] + others) / 3
        torch.testing.assert_close(eager_gradient(fresh[i], stale[i], stale.mean(0), 3), expected)


# --- Asynchronous


def start_of_delayed(num_elements: int) -> DelayedState:
    return DelayedState(
        weights_P=torch.randn(num_elements),
        momentum_P=torch.randn(num_elements),
        buffer_P=torch.zeros(num_elements),
        num_arrivals=0,
    )


def test_delayed_nesterov_with_one_arrival_a_move_is_nesterov() -> None:
    state, outer = start_of_delayed(5), OuterSpec(lr=0.3, momentum=0.8)
    weights_P, momentum_P = state.weights_P, state.momentum_P
    for _ in range(3):
        gradient_P = torch.randn(5)
        state = delayed_nesterov_step(state, gradient_P, outer, every=1)
        weights_P, momentum_P = outer_step(weights_P, momentum_P, gradient_P, outer)
    torch.testing.assert_close(state.weights_P, weights_P)
    torch.testing.assert_close(state.momentum_P, momentum_P)


@pytest.mark.parametrize("c", [0.0, 0.25])
def test_equal_arrivals_are_one_nesterov_step_of_their_mean(c: float) -> None:
    """Whatever c: it only spreads the momentum's part over the arrivals (old momentum 0)."""
    outer, every = OuterSpec(lr=0.3, momentum=0.8), 4
    state = start_of_delayed(5)
    state = DelayedState(state.weights_P, torch.zeros(5), state.buffer_P, 0)
    expected_P, _ = outer_step(state.weights_P, state.momentum_P, torch.ones(5), outer)
    for _ in range(every):
        state = delayed_nesterov_step(state, torch.ones(5), outer, every=every, c=c)
    lacks = 0.3 * 0.8 * c * (every - 1)  # the first three used a momentum that was still 0
    torch.testing.assert_close(state.weights_P, expected_P + lacks)
    assert float(state.buffer_P.abs().max()) == 0.0


def test_the_slow_take_fewer_steps_and_at_least_one() -> None:
    assert dynamic_steps((4.0, 2.0, 0.5, 0.01), 20) == (20, 10, 2, 1)
    assert dynamic_steps((3.0, 3.0), 7) == (7, 7)


def test_arrivals_come_in_order_of_time_and_those_within_the_grace_together() -> None:
    done_at = [3.0, 1.0, 1.0, 1.4]
    assert next_arrivals(done_at, 0.0) == (1, 2)
    assert next_arrivals(done_at, 0.5) == (1, 2, 3)
    assert next_arrivals(done_at, 5.0) == (1, 2, 3, 0)


def test_without_dynamic_steps_the_fast_contribute_more_often(task: LabTask) -> None:
    plan = AsyncPlan(speeds=(3.0, 1.0), steps_a_round=H, is_dynamic=False)
    _, (report, *_) = run(plan, task, num_rounds=1)
    one_contribution = run(diloco(1), task, num_rounds=1)[1][0]
    assert report.num_tokens == 2 * one_contribution.num_tokens  # both of the fast one
    assert report.bytes_sent == one_contribution.bytes_sent  # two, of two workers


def test_speeds_are_above_zero() -> None:
    with pytest.raises(ConfigError):
        AsyncPlan(speeds=(1.0, 0.0), steps_a_round=4)


# --- What is common to all


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        OverlapPlan(num_workers=2, steps_a_round=H, overlap_steps=0),
        EagerPlan(num_workers=1, steps_a_round=H),
        StreamingPlan(num_workers=2, steps_a_round=H, num_fragments=1, alpha=0.0),
        AsyncPlan(speeds=(1.0, 1.0), steps_a_round=H),
    ],
    ids=lambda plan: type(plan).__name__,
)
def test_the_momentum_warms_up_as_in_diloco(task: LabTask, plan: Plan) -> None:
    assert isinstance(plan, OverlapPlan | EagerPlan | StreamingPlan | AsyncPlan)
    num_workers = 1 if isinstance(plan, EagerPlan) else 2
    warming = OuterSpec(momentum=0.9, momentum_warmup_rounds=2, warmup_momentum=0.0)
    expected_P = weights_after(dataclasses.replace(diloco(num_workers), outer=warming), task)
    weights_P = weights_after(dataclasses.replace(plan, outer=warming), task)
    torch.testing.assert_close(weights_P, expected_P, rtol=0, atol=1e-5)
    assert not torch.allclose(weights_P, weights_after(diloco(num_workers), task), atol=1e-4)
