"""What the lab trains on: a model's shape, the inner optimizer, texts, and a length.

Runs in: lab. Pure, but for reading the texts that the package ships.

A task holds a whole RunSpec, since the trainer's functions take one; a strategy puts its own codec
and outer optimizer into it. Length is counted in *nominal inner steps*: the steps that a worker of
ordinary speed takes. They are also the clock of the learning rate, so that every strategy cools
down alike, however long its rounds are.

Shape legend: P parameters, B sequences, T1 = context_tokens + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from volunteer.run import (
    CodecSpec,
    DataSpec,
    EvaluationSpec,
    GenesisSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RunSpec,
)
from volunteer.training.data import Corpus, load_corpus, training_windows
from volunteer.training.devices import Device
from volunteer.training.evaluation import held_out_loss
from volunteer.training.genesis import build_genesis
from volunteer.training.state import SharedState

TEXTS = ("builtin:shakespeare", "builtin:folio", "builtin:milton")
CPU = Device(torch_device=torch.device("cpu"), name="CPU", autocast_dtype=None)
"""Of every worker: models of the lab are small, and fp32 on a CPU is the same every time."""
MICRO_BATCH_TOKENS = 1024
_NO_HASH = "0" * 64  # the genesis state is made here, from the seed, and not looked up


@dataclass(frozen=True, slots=True, kw_only=True)
class LabTask:
    """What all arms of an experiment have in common."""

    spec: RunSpec
    """Model, data, inner optimizer and evaluation; a strategy replaces `outer` and `codec`."""
    num_steps: int
    """Length, in nominal inner steps."""
    evaluate_every_steps: int
    """The held-out loss is measured at the first round that ends so many steps after the last."""
    pretrained_steps: int = 0
    """Inner steps that one worker takes before an arm begins (beginning.py); they count neither as
    steps nor as tokens."""

    def run_spec(self, seed: int, *, outer: OuterSpec, codec: CodecSpec) -> RunSpec:
        """Return the RunSpec of one arm: its seed makes the first weights and the data's order."""
        return msgspec.structs.replace(
            self.spec,
            genesis=msgspec.structs.replace(self.spec.genesis, seed=seed),
            inner=msgspec.structs.replace(self.spec.inner, decay_rounds=self.num_steps),
            outer=outer,
            codec=codec,
        )


def make_task(
    *,
    num_layers: int = 2,
    dim: int = 96,
    num_heads: int = 4,
    ffn_dim: int = 320,
    context_tokens: int = 64,
    batch_sequences: int = 8,
    lr: float = 3e-3,
    warmup_steps: int = 20,
    num_steps: int = 1000,
    evaluate_every_steps: int = 100,
    held_out_sequences: int = 512,
    sources: tuple[str, ...] = TEXTS,
    pretrained_steps: int = 0,
) -> LabTask:
    """Return a task over bytes; by default 283 k parameters, the shape of the demo's run.

    Args:
        num_layers: of the decoder.
        dim: its width.
        num_heads: of its attention.
        ffn_dim: hidden width of SwiGLU.
        context_tokens: of a sequence.
        batch_sequences: of one worker's inner step.
        lr: peak of the inner learning rate; a cosine to a tenth of it over the task's length.
        warmup_steps: of the inner learning rate.
        num_steps: length, nominal inner steps.
        evaluate_every_steps: between two measurements of the held-out loss.
        held_out_sequences: windows of such a measurement, the same every time.
        sources: as in a RunSpec.
        pretrained_steps: of one worker, before an arm begins.
    """
    spec = RunSpec(
        name="lab",
        model=ModelSpec(
            num_layers=num_layers,
            dim=dim,
            num_heads=num_heads,
            ffn_dim=ffn_dim,
            context_tokens=context_tokens,
        ),
        genesis=GenesisSpec(seed=0, state_hash=_NO_HASH),
        data=DataSpec(sources=sources),
        inner=InnerSpec(
            lr=lr,
            warmup_steps=warmup_steps,
            decay_rounds=num_steps,
            batch_sequences=batch_sequences,
        ),
        evaluation=EvaluationSpec(num_sequences=held_out_sequences),
    )
    return LabTask(
        spec=spec,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        pretrained_steps=pretrained_steps,
    )


def small_task(
    *, num_steps: int = 400, evaluate_every_steps: int = 50, pretrained_steps: int = 0
) -> LabTask:
    """Return the task of the acceptance tests: 123 k parameters, 16 sequences of 32 bytes."""
    return make_task(
        dim=64,
        ffn_dim=192,
        context_tokens=32,
        batch_sequences=16,
        lr=2e-3,
        num_steps=num_steps,
        evaluate_every_steps=evaluate_every_steps,
        held_out_sequences=1024,
        pretrained_steps=pretrained_steps,
    )


def genesis_of(spec: RunSpec) -> SharedState:
    """Return the state of round 0 that the seed in `spec` makes."""
    return build_genesis(spec)


def corpus_of(task: LabTask) -> Corpus:
    """Return the task's texts."""
    return load_corpus(task.spec.data)


def windows_of(corpus: Corpus, spec: RunSpec, *, stream: bytes, position: int) -> Tensor:
    """Return what inner step `position` of a data stream reads.

    Args:
        corpus: the whole one, or a worker's shard.
        spec: of the arm; its seed is part of the choice.
        stream: of the worker.
        position: inner steps that were taken from this stream before.

    Returns:
        int64, shape (B, T1).
    """
    windows = training_windows(
        corpus,
        run_id=f"lab/{spec.genesis.seed}",
        peer_seed=stream,
        inner_step=position,
        num_sequences=spec.inner.batch_sequences,
        context_tokens=spec.model.context_tokens,
    )
    return torch.from_numpy(windows).long()


def loss_of(spec: RunSpec, weights_P: Tensor) -> float:
    """Return the held-out loss, nats per byte."""
    return held_out_loss(spec, weights_P)


def micro_batch_sequences(spec: RunSpec, num_sequences: int) -> int:
    """Return how many of a step's sequences go through the model at a time."""
    return max(1, min(num_sequences, MICRO_BATCH_TOKENS // spec.model.context_tokens))
