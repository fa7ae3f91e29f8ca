"""Streaming, NoLoCo and asynchronous training against plain loops over whole vectors, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.volunteer.lab.tiny import two_layer_task
from volunteer.lab.training.beginning import first_state
from volunteer.lab.training.strategies.asynchronous import AsyncPlan
from volunteer.lab.training.strategies.diloco import FP32
from volunteer.lab.training.strategies.noloco import NolocoPlan, draw_pairs
from volunteer.lab.training.strategies.streaming import StreamingPlan, cut_fragments
from volunteer.lab.training.strategy import Plan
from volunteer.lab.training.task import LabTask, corpus_of
from volunteer.lab.training.worker import Worker
from volunteer.run import OuterSpec

H = 4
NUM_WORKERS = 3
OUTER = OuterSpec(lr=0.7, momentum=0.8)


@pytest.fixture(scope="module")
def task() -> LabTask:
    return two_layer_task(3 * H)


def workers_of(task: LabTask, num_workers: int) -> tuple[list[Worker], Tensor]:
    spec = task.run_spec(1, outer=OUTER, codec=FP32)
    first_P = first_state(task, 1).weights_P
    corpus = corpus_of(task)
    workers = [Worker(spec, corpus, first_P, seed=1, index=i) for i in range(num_workers)]
    return workers, first_P.double()


def weights_after(plan: Plan, task: LabTask, num_rounds: int) -> Tensor:
    strategy = plan.begin(task, 1)
    for _ in range(num_rounds):
        strategy.advance()
    return strategy.weights().double()


def assert_close(seen_P: Tensor, expected_P: Tensor) -> None:
    torch.testing.assert_close(seen_P, expected_P, rtol=0, atol=2e-6)


def test_streaming_two_fragments_with_delay_and_mixing(task: LabTask) -> None:
    delay, alpha = 1, 0.25
    workers, shared_P = workers_of(task, NUM_WORKERS)
    momentum_P = torch.zeros_like(shared_P)
    masks = []
    for ranges in cut_fragments(workers[0].spec.model, 2):
        mask_P = torch.zeros(len(shared_P), dtype=torch.bool)
        for start, end in ranges:
            mask_P[start:end] = True
        masks.append(mask_P)
    arrives: dict[int, Tensor] = {}
    for step in range(1, 2 * H + 1):
        for worker in workers:
            worker.train(1, clock=step - 1, clock_steps=1)
        if step % (H // 2) == 0:
            mask_P = masks[(step // (H // 2) - 1) % 2]
            gradient_P = sum((shared_P - w.theta_P for w in workers), torch.zeros_like(shared_P))
            gradient_P = gradient_P / NUM_WORKERS
            moved_P = OUTER.momentum * momentum_P + gradient_P
            momentum_P = torch.where(mask_P, moved_P, momentum_P)
            stepped_P = shared_P - OUTER.lr * (gradient_P + OUTER.momentum * moved_P)
            shared_P = torch.where(mask_P, stepped_P, shared_P)
            arrives[step + delay] = mask_P
        if step in arrives:
            mask_P = arrives[step]
            for worker in workers:
                mixed_P = alpha * worker.theta_P + (1 - alpha) * shared_P
                worker.theta_P.copy_(torch.where(mask_P, mixed_P, worker.theta_P.double()))
    plan = StreamingPlan(
        num_workers=NUM_WORKERS,
        steps_a_round=H,
        num_fragments=2,
        delay_steps=delay,
        alpha=alpha,
        outer=OUTER,
    )
    assert_close(weights_after(plan, task, 2), shared_P)


def test_noloco_in_the_papers_sign(task: LabTask) -> None:
    workers, first_P = workers_of(task, NUM_WORKERS)
    slow = [first_P.clone() for _ in workers]
    momenta = [torch.zeros_like(first_P) for _ in workers]
    alpha, beta, gamma = 0.5, 0.7, 0.7
    for round_index in range(3):
        for worker in workers:
            worker.train(H, clock=round_index * H, clock_steps=H)
        moved = [worker.theta_P.double() - slow[i] for i, worker in enumerate(workers)]
        before = list(slow)
        for group in draw_pairs(NUM_WORKERS, seed=1, round_index=round_index):
            n = len(group)
            mean_moved = sum((moved[j] for j in group), torch.zeros_like(first_P)) / n
            mean_slow = sum((before[j] for j in group), torch.zeros_like(first_P)) / n
            for i in group:
                pull = gamma * (before[i] - mean_slow)
                momenta[i] = alpha * momenta[i] + beta * mean_moved - pull
                slow[i] = before[i] + momenta[i]
                workers[i].theta_P.copy_(slow[i])
    expected_P = torch.stack(slow).mean(0)
    plan = NolocoPlan(num_workers=NUM_WORKERS, steps_a_round=H)
    assert_close(weights_after(plan, task, 3), expected_P)


def test_a_fast_and_a_slow_worker_take_turns_on_weights_of_different_age(task: LabTask) -> None:
    """Speeds 2 and 1, H steps each: the fast one arrives at 2, 4, 6 and 8, the slow at 4, 8."""
    (fast, slow), shared_P = workers_of(task, 2)
    momentum_P, buffer_P = torch.zeros_like(shared_P), torch.zeros_like(shared_P)
    began = {0: shared_P, 1: shared_P}
    clocks = {0: 0, 1: 0}
    arrived = 0

    def arrive(index: int, worker: Worker) -> None:
        nonlocal shared_P, momentum_P, buffer_P, arrived
        clock_steps = round(H / (2.0, 1.0)[index] * 1.5)
        worker.train(H, clock=clocks[index], clock_steps=clock_steps)
        gradient_P = began[index] - worker.theta_P
        buffer_P = buffer_P + gradient_P
        arrived += 1
        step_P = gradient_P / 2
        if arrived % 2 == 0:
            momentum_P = OUTER.momentum * momentum_P + buffer_P / 2
            buffer_P = torch.zeros_like(buffer_P)
            step_P = step_P + OUTER.momentum * momentum_P
        shared_P = shared_P - OUTER.lr * step_P

    def begin(index: int, worker: Worker, clock: int) -> None:
        worker.theta_P.copy_(shared_P)
        began[index], clocks[index] = shared_P, clock

    arrive(0, fast)
    begin(0, fast, H // 2)
    arrive(0, fast)
    arrive(1, slow)  # at the same time as the fast one's second
    begin(0, fast, 3 * H // 2)
    begin(1, slow, 3 * H // 2)
    arrive(0, fast)
    begin(0, fast, 2 * H)
    arrive(0, fast)
    arrive(1, slow)
    plan = AsyncPlan(speeds=(2.0, 1.0), steps_a_round=H, is_dynamic=False, outer=OUTER)
    assert_close(weights_after(plan, task, 2), shared_P)
