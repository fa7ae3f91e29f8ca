"""Streaming DiLoCo: fragments of the model are shared in turn, and training never waits for them.

Runs in: lab.

The layers are cut into fragments, strided: layer l belongs to fragment l mod N. Fragment p is sent
every H steps, at its own offset, and what comes back is mixed in tau steps later:

    at s = offset_p mod H:   D_{p,i} = G_p - theta_{p,i}, by the codec
    at s + tau:              G_p = OuterOpt(G_p, mean of D_p)
                             theta_{p,i} <- alpha * theta_{p,i} + (1 - alpha) * G_p

Paper: arXiv:2501.18512. Its fragments, offsets, overlap and mixing as in docs/design/ALGORITHMS.md
section 7 (alpha is marked there as from memory); offsets and the embedding's place as in
pytorch/torchft, torchft/local_sgd.py (`fragment_sync_offset`, read; it has alpha = 0 alone). The
paper's body was not to be had here, so no equation of it is quoted by number.
Differs: int4 (or another codec of the program, with its error feedback) instead of E3M0; the
embedding is part of fragment 0, the last norm and an output matrix of the last fragment.

A worker sends as many bytes as in DiLoCo, but an N-th of them at a time.

Measured is G with what is in flight applied. At the end of a round all fragments but the last are
of before its end, so that G holds somewhat less work than DiLoCo's. With one fragment, tau = 0 and
alpha = 0 it is DiLoCo to the last bit.

Shape legend: P parameters, S those of a fragment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from volunteer.errors import ConfigError
from volunteer.lab.training.exchange import apply_commit, listed_work
from volunteer.lab.training.strategies.crew import Crew, SharingPlan
from volunteer.lab.training.strategy import RoundReport
from volunteer.lab.training.task import LabTask
from volunteer.lab.training.worker import Sent, Worker
from volunteer.messages import Encoded
from volunteer.run import ModelSpec
from volunteer.training import pseudo_gradient
from volunteer.training.layout import model_layout
from volunteer.training.pseudo_gradient import RunCodec
from volunteer.training.state import SharedState

Ranges = tuple[tuple[int, int], ...]
"""The (start, end) of a fragment's pieces in the flat vector, ascending and apart."""


def cut_fragments(model: ModelSpec, num_fragments: int) -> tuple[Ranges, ...]:
    """Return the fragments of a model; together they cover its flat vector once.

    Raises:
        ConfigError: there are more fragments than layers.
    """
    if not 1 <= num_fragments <= model.num_layers:
        raise ConfigError(f"{model.num_layers} layers make no {num_fragments} fragments")
    fragments: list[list[tuple[int, int]]] = [[] for _ in range(num_fragments)]
    has_layers_before = False
    for slot in model_layout(model):
        if slot.name.startswith("layers."):
            index = int(slot.name.split(".")[1]) % num_fragments
            has_layers_before = True
        else:
            index = num_fragments - 1 if has_layers_before else 0
        ranges = fragments[index]
        if ranges and ranges[-1][1] == slot.offset:
            ranges[-1] = (ranges[-1][0], slot.end)
        else:
            ranges.append((slot.offset, slot.end))
    return tuple(tuple(ranges) for ranges in fragments)


def take(vector_P: Tensor, ranges: Ranges) -> Tensor:
    """Return a fragment of a flat vector: a copy, shape (S,)."""
    return torch.cat([vector_P[start:end] for start, end in ranges])


def put(vector_P: Tensor, ranges: Ranges, fragment_S: Tensor) -> None:
    """Write a fragment to its place in a flat vector."""
    at = 0
    for start, end in ranges:
        vector_P[start:end] = fragment_S[at : at + end - start]
        at += end - start


def sent_at(step: int, fragment: int, num_fragments: int, steps_a_round: int) -> bool:
    """Tell whether a fragment is sent after `step` inner steps: the last one when a round ends."""
    offset = steps_a_round * (fragment + 1) // num_fragments
    return step > 0 and (step - offset) % steps_a_round == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingPlan(SharingPlan):
    """K workers that share one fragment at a time."""

    num_fragments: int
    delay_steps: int = 0
    """tau, below H: from sending a fragment to mixing in what came back."""
    alpha: float = 0.5
    """How much of a worker's own fragment stays when the shared one is mixed in, 0..1."""

    def __post_init__(self) -> None:
        """Check what the schedule needs.

        Raises:
            ConfigError: a fragment would be sent again before it is back, or alpha is no fraction.
        """
        if not 0 <= self.delay_steps < self.steps_a_round or not 0.0 <= self.alpha <= 1.0:
            raise ConfigError("streaming: delay_steps is below steps_a_round, alpha is in 0..1")

    def begin(self, task: LabTask, seed: int) -> Streaming:
        """Return the strategy before its first step."""
        return Streaming(self, task, seed)


class Streaming:
    """Shared fragments, and those that are in flight."""

    def __init__(self, plan: StreamingPlan, task: LabTask, seed: int) -> None:
        """Begin on the first state."""
        self._plan = plan
        self._crew = Crew(plan, task, seed)
        self._fragments = cut_fragments(self._crew.spec.model, plan.num_fragments)
        first = self._crew.first
        self._states = [
            SharedState(
                weights_P=take(first.weights_P, ranges),
                momentum_P=take(first.momentum_P, ranges),
            )
            for ranges in self._fragments
        ]
        """Of every fragment, with what is in flight applied."""
        self._due: dict[int, int] = {}
        """When each fragment that is in flight comes back, by its index."""

    def weights(self) -> Tensor:
        """Return the shared weights, once what is in flight has arrived."""
        weights_P = torch.empty_like(self._crew.first.weights_P)
        for ranges, state in zip(self._fragments, self._states, strict=True):
            put(weights_P, ranges, state.weights_P)
        return weights_P

    def advance(self) -> RoundReport:
        """Train for a round; every fragment is sent once meanwhile."""
        num_steps = self._crew.steps_left(self._plan.steps_a_round)
        num_tokens = total_bytes = 0
        for _ in range(num_steps):
            num_tokens += self._crew.train(1)
            step = self._crew.step
            for index in range(self._plan.num_fragments):
                if sent_at(step, index, self._plan.num_fragments, self._plan.steps_a_round):
                    total_bytes += self._send(index)
                    self._due[index] = step + self._plan.delay_steps
            for index in [index for index, due in self._due.items() if due == step]:
                self._mix_in(index)
                del self._due[index]
        return self._crew.report(num_steps, num_tokens, total_bytes)

    def _send(self, index: int) -> int:
        """Let all contribute a fragment, and take its outer step; return the bytes of all."""
        sent = [self._contribute(worker, index) for worker in self._crew.workers]
        listed = [listed_work(one) for one in sent]
        outer = self._crew.spec.outer.at_round(self._round_index)
        applied = apply_commit(self._states[index], sent, listed, outer)
        self._states[index] = applied.state
        return sum(one.encoded.blob_bytes for one in sent)

    @property
    def _round_index(self) -> int:
        return (self._crew.step - 1) // self._plan.steps_a_round

    def _contribute(self, worker: Worker, index: int) -> Sent:
        """Encode a worker's work on a fragment since it was last shared."""
        ranges, state, spec = self._fragments[index], worker.state, self._crew.spec
        round_index = self._round_index
        contributed = pseudo_gradient.contribute(
            take(worker.theta_P, ranges),
            take(state.base_P, ranges),
            take(state.residual_P, ranges),
            RunCodec(spec.codec, round_index),
        )
        put(state.residual_P, ranges, contributed.residual_P)
        blob = worker.blob_of(contributed.encoded, round_index)
        encoded = Encoded(
            base="",
            round_index=round_index,
            blob_id=blake3(blob).hexdigest(),
            blob_bytes=len(blob),
            codec=spec.codec.id,
            codec_version=spec.codec.version,
            tokens=state.progress.tokens_total,
            carries=(),
        )
        return Sent(
            contribution_id=f"{worker.author}/{round_index}/{index}",
            author=worker.author,
            encoded=encoded,
            gradient=contributed.encoded,
        )

    def _mix_in(self, index: int) -> None:
        ranges, shared_S = self._fragments[index], self._states[index].weights_P
        for worker in self._crew.workers:
            local_S = take(worker.theta_P, ranges)
            put(worker.theta_P, ranges, mixed(local_S, shared_S, self._plan.alpha))
            put(worker.state.base_P, ranges, shared_S)


def mixed(local_S: Tensor, shared_S: Tensor, alpha: float) -> Tensor:
    """Return alpha * local + (1 - alpha) * shared."""
    return local_S * alpha + shared_S * (1.0 - alpha)


def covers(fragments: Iterable[Ranges], num_parameters: int) -> bool:
    """Tell whether fragments cover a flat vector once."""
    pieces = sorted(piece for ranges in fragments for piece in ranges)
    ends = [0, *(end for _, end in pieces)]
    return [start for start, _ in pieces] == ends[:-1] and ends[-1] == num_parameters
