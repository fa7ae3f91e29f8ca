"""The weights that an arm begins on: the genesis state, or what one worker has made of it.

Runs in: lab.

From the genesis state a small model first learns how often each byte occurs, and stays there for
some hundred steps until it finds the next thing to learn; when, is chance, and decides the loss of
a short run more than any strategy does (LOGBOOK.md, 2026-11-30). So a task may let one worker train
first, alike for all arms of a seed. DiLoCo's paper begins on 24,000 such steps
(arXiv:2311.08105, section 3.1), and finds that they matter little in a long run.
"""

from __future__ import annotations

import functools

import msgspec
import torch

from volunteer.lab.training.task import LabTask, corpus_of, genesis_of
from volunteer.lab.training.worker import Worker
from volunteer.run import CodecSpec, OuterSpec
from volunteer.training.state import SharedState

PRETRAINED_STEPS = 200
"""Enough for the small task: it was past its first plateau after 75 to 150."""
FIRST_REMARK = (
    f"Every arm begins on what one worker had learned in {PRETRAINED_STEPS} steps (volunteer/lab/"
    "training/beginning.py says why); they are not among the tokens."
)
"""For the tables of experiments that begin so."""
_INDEX = 1_000_000
"""Of the worker that trains first: no other has its data stream."""


@functools.lru_cache(maxsize=4)
def first_state(task: LabTask, seed: int) -> SharedState:
    """Return what every worker of an arm begins on; without momentum. Not to be changed.

    The worker that trains first has AdamW, whatever the arm has, so that all begin alike. It trains
    at the full learning rate; those who go on have empty moments, and warm up again.
    """
    spec = task.run_spec(seed, outer=OuterSpec(), codec=CodecSpec(id="fp32"))
    inner = msgspec.structs.replace(spec.inner, optimizer="adamw")
    spec = msgspec.structs.replace(spec, inner=inner)
    genesis = genesis_of(spec)
    if task.pretrained_steps == 0:
        return genesis
    worker = Worker(spec, corpus_of(task), genesis.weights_P, seed=seed, index=_INDEX)
    worker.train(task.pretrained_steps, clock=0, clock_steps=1)
    weights_P = worker.theta_P.clone()
    return SharedState(weights_P=weights_P, momentum_P=torch.zeros_like(weights_P))
