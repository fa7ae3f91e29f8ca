"""Where an arm begins: on the genesis state, or on what one worker has made of it."""

from __future__ import annotations

import dataclasses

import msgspec
import torch

from tests.volunteer.lab.tiny import two_layer_task
from volunteer.lab.training.beginning import first_state
from volunteer.lab.training.strategies.data_parallel import DataParallelPlan
from volunteer.lab.training.strategies.diloco import DiLoCoPlan
from volunteer.lab.training.strategies.overlap import OverlapPlan
from volunteer.lab.training.task import LabTask, genesis_of, loss_of
from volunteer.run import CodecSpec, OuterSpec


def task(pretrained_steps: int) -> LabTask:
    return dataclasses.replace(two_layer_task(8), pretrained_steps=pretrained_steps)


def test_begins_on_the_genesis_state_unless_told() -> None:
    spec = task(0).run_spec(3, outer=OuterSpec(), codec=CodecSpec())
    assert torch.equal(first_state(task(0), 3).weights_P, genesis_of(spec).weights_P)


def test_what_one_worker_learned_first_is_the_same_for_all_strategies() -> None:
    begun = task(5)
    first_P = first_state(begun, 3).weights_P
    spec = begun.run_spec(3, outer=OuterSpec(), codec=CodecSpec())
    assert loss_of(spec, first_P) < loss_of(spec, genesis_of(spec).weights_P)
    for plan in (
        DataParallelPlan(num_workers=2),
        DiLoCoPlan(num_workers=2, steps_a_round=4),
        OverlapPlan(num_workers=2, steps_a_round=4, overlap_steps=1),
    ):
        strategy = plan.begin(begun, 3)
        assert torch.equal(strategy.weights(), first_P)
        strategy.advance()
    assert torch.equal(first_state(begun, 3).weights_P, first_P)  # nobody trained it on
    assert not torch.equal(first_state(begun, 4).weights_P, first_P)


def test_begins_alike_whatever_the_inner_optimizer() -> None:
    begun = task(3)
    inner = msgspec.structs.replace(begun.spec.inner, optimizer="muon")
    muon = dataclasses.replace(begun, spec=msgspec.structs.replace(begun.spec, inner=inner))
    assert torch.equal(first_state(begun, 3).weights_P, first_state(muon, 3).weights_P)
