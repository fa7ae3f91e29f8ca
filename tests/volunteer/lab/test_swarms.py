"""Data-parallel and DiLoCo workers against what they must reduce to, and attackers among them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.volunteer.lab.tiny import points, tiny_task, trained
from volunteer.lab.training.attacks import Attack
from volunteer.lab.training.results import NOTE_SEPARATOR
from volunteer.lab.training.strategies.data_parallel import DataParallelPlan
from volunteer.lab.training.strategies.diloco import FEDAVG, DiLoCoPlan, excluded_note
from volunteer.lab.training.strategy import Plan
from volunteer.run import CodecSpec, OuterSpec

BASE = DiLoCoPlan(num_workers=3, steps_a_round=2)
TOKENS_A_STEP = 2 * 8
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "plan",
    [
        DataParallelPlan(num_workers=2),
        replace(BASE, codec=CodecSpec(id="int4", block_elements=64)),
        replace(BASE, steps_by_worker=(4, 2, 1), sharding="clusters"),
        replace(BASE, drop_fraction=0.5),
        replace(BASE, workers_by_phase=(1, 3)),
        replace(BASE, num_workers=5, attackers=((4, "noise"),)),
    ],
)
def test_a_strategy_gives_the_same_numbers_twice_and_others_with_another_seed(plan: Plan) -> None:
    once = points(plan)
    assert points(plan) == once
    losses = [point.loss for point in once]
    assert losses != [point.loss for point in points(plan, seed=1)]
    assert losses[-1] < losses[0]


def test_ddp_of_one_worker_is_that_worker() -> None:
    task = tiny_task()
    ddp = trained(DataParallelPlan(num_workers=1), task)
    # The one round's contribution moves the shared weights to where the worker stands.
    plan = DiLoCoPlan(num_workers=1, steps_a_round=task.num_steps, outer=FEDAVG)
    torch.testing.assert_close(ddp.weights(), trained(plan, task).weights(), rtol=0, atol=1e-6)


def test_diloco_of_one_worker_without_momentum_is_uninterrupted_adamw() -> None:
    task = tiny_task(num_steps=12)
    plan = DiLoCoPlan(num_workers=1, steps_a_round=3, outer=FEDAVG)
    alone = trained(DataParallelPlan(num_workers=1), task)
    torch.testing.assert_close(trained(plan, task).weights(), alone.weights(), rtol=0, atol=1e-6)


def test_bytes_are_gradients_in_every_step_or_a_blob_a_round() -> None:
    task = tiny_task()
    num_parameters = trained(BASE, task).weights().numel()
    assert points(DataParallelPlan(num_workers=1))[-1].bytes_per_worker == 0
    ddp = points(DataParallelPlan(num_workers=3))[-1]
    assert ddp.bytes_per_worker == task.num_steps * 4 * num_parameters
    diloco = points(BASE)[-1]
    num_rounds = task.num_steps // BASE.steps_a_round
    header_bytes = diloco.bytes_per_worker / num_rounds - 4 * num_parameters
    assert 0 < header_bytes < 1000
    int4 = points(replace(BASE, codec=CodecSpec(id="int4")))[-1]
    assert int4.bytes_per_worker < diloco.bytes_per_worker / 2
    assert ddp.tokens == diloco.tokens == int4.tokens == 3 * task.num_steps * TOKENS_A_STEP


def test_unequal_speeds_are_unequal_steps() -> None:
    plan = replace(BASE, steps_by_worker=(4, 2, 1))
    by_tokens = points(plan)[-1]
    assert by_tokens.tokens == 4 * (4 + 2 + 1) * TOKENS_A_STEP
    assert by_tokens.loss != points(replace(plan, weighting="uniform"))[-1].loss
    equal = replace(BASE, steps_by_worker=(2, 2, 2))
    assert points(equal)[-1].loss == points(replace(equal, weighting="uniform"))[-1].loss


def test_dropped_work_stays_in_the_local_weights_and_comes_with_the_next_contribution() -> None:
    """Nothing is missing where the last round is listed; where it is dropped, that round is."""
    task = tiny_task(num_steps=12)
    plan = DiLoCoPlan(num_workers=1, steps_a_round=2, outer=FEDAVG, drop_fraction=0.5)
    distances = []
    for seed in range(3):
        swarm = plan.begin(task, seed)
        for _ in range(6):
            swarm.advance()
        alone = trained(DataParallelPlan(num_workers=1), task, seed=seed).weights()
        (worker,) = swarm.workers
        torch.testing.assert_close(worker.theta_P, alone, rtol=0, atol=1e-6)
        distances.append(float((swarm.weights() - alone).abs().max()))
    assert min(distances) < 1e-6
    assert max(distances) > 1e-3


def test_workers_come_and_go() -> None:
    task = tiny_task()
    up = points(replace(BASE, workers_by_phase=(1, 3)), task)
    down = points(replace(BASE, workers_by_phase=(3, 1)), task)
    assert up[-1].tokens == down[-1].tokens == (1 + 3) * 4 * TOKENS_A_STEP
    assert up[1].tokens < down[1].tokens


def exclusions(plan: DiLoCoPlan, num_steps: int = 8) -> list[tuple[str, int]]:
    rows = points(plan, tiny_task(num_steps))
    notes = [note for point in rows for note in point.notes.split(NOTE_SEPARATOR)]
    return [excluded_note(note) for note in notes if note.startswith("excluded")]


@pytest.mark.parametrize(
    ("attack", "commit"), [("-10 D", 2), ("-20 D", 2), ("noise", 2), ("stale", 3)]
)
def test_an_attacker_is_excluded_and_nobody_else(attack: Attack, commit: int) -> None:
    plan = DiLoCoPlan(num_workers=5, steps_a_round=2, attackers=((2, attack),))
    assert exclusions(plan) == [("worker-2", commit)]


def test_a_copier_is_excluded_by_scorers_alone() -> None:
    plan = DiLoCoPlan(num_workers=6, steps_a_round=2, attackers=((2, "copied"),))
    assert exclusions(plan, 16) == []
    scored = exclusions(replace(plan, has_scorers=True), 16)
    assert [author for author, _ in scored] == ["worker-2"]


def pair_of(attack: Attack) -> DiLoCoPlan:
    """Return a swarm of eight of which the last two attack."""
    return DiLoCoPlan(num_workers=8, steps_a_round=2, attackers=((7, attack), (6, attack)))


def test_two_copiers_of_eight_are_out_as_early_as_verdicts_can_have_them() -> None:
    plan = replace(pair_of("copied"), has_scorers=True)
    assert exclusions(plan) == [("worker-6", 3), ("worker-7", 3)]


def test_spikes_pass_every_filter_and_are_trimmed() -> None:
    mean = pair_of("spikes")
    trimmed = replace(mean, outer=OuterSpec(aggregation="trimmed_mean"))
    led, kept = points(mean, tiny_task(num_steps=16)), points(trimmed, tiny_task(num_steps=16))
    assert not any(point.notes for point in (*led, *kept))
    assert kept[-1].loss < led[-1].loss


def test_a_slow_honest_worker_on_another_text_is_not_excluded() -> None:
    slow = replace(BASE, num_workers=5, steps_by_worker=(4, 4, 4, 4, 1), sharding="outlier")
    assert not any("excluded" in point.notes for point in points(slow))


def test_training_that_runs_away_ends_with_an_infinite_loss() -> None:
    plan = replace(BASE, outer=OuterSpec(lr=1e9))
    last = points(plan, tiny_task(num_steps=20))[-1]
    assert last.is_last
    assert last.loss == float("inf")
    assert last.notes.startswith("broke down: ")
