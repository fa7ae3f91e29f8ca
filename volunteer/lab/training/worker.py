"""One worker of the lab: a volunteer's training, called directly.

Runs in: lab.

Everything is done by the trainer's own functions (training/diloco.py); a worker adds the order in
which a trainer process would call them, and keeps blobs in memory instead of on disk.

Shape legend: P parameters, B sequences, T1 = context_tokens + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from blake3 import blake3
from torch import Tensor

from volunteer.errors import TrainerError
from volunteer.lab.training.task import CPU, micro_batch_sequences, windows_of
from volunteer.messages import Contribute, Encoded, OwnWork, Rebase
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import RunSpec
from volunteer.training import compression, diloco
from volunteer.training.compression import EncodedGradient
from volunteer.training.contribution_blob import BlobKey, write_contribution_blob
from volunteer.training.data import Corpus
from volunteer.training.diloco import LocalState
from volunteer.training.pseudo_gradient import RunCodec


def stream_of(seed: int, index: int) -> bytes:
    """Return the peer seed of worker `index`: its own data stream in every arm with this seed."""
    return blake3(f"allmende/lab/worker/{seed}/{index}".encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sent:
    """One contribution, as the others get it."""

    contribution_id: str
    author: str
    encoded: Encoded
    gradient: EncodedGradient
    copy_of: str = ""
    """Contribution that was published before, and whose content this one has; empty: none."""

    @property
    def own_work(self) -> OwnWork:
        """As the books name it."""
        return OwnWork(
            contribution_id=self.contribution_id,
            blob_id=self.encoded.blob_id,
            carries=self.encoded.carries,
        )


class Worker:
    """The state of one volunteer, and its place in its data."""

    def __init__(
        self, spec: RunSpec, corpus: Corpus, weights_P: Tensor, *, seed: int, index: int
    ) -> None:
        """Begin on shared weights.

        Args:
            spec: of the arm.
            corpus: what this worker reads.
            weights_P: G, fp32, shape (P,); not kept.
            seed: of the arm.
            index: of the worker, from 0.
        """
        self.spec = spec
        self.index = index
        self.author = f"worker-{index}"
        self.state: LocalState = diloco.fresh_state(weights_P, spec, CPU)
        self._corpus = corpus
        self._stream = stream_of(seed, index)
        self._own: dict[str, Sent] = {}

    @property
    def theta_P(self) -> Tensor:
        """The local weights themselves, fp32, shape (P,)."""
        return self.state.weights.weights_P

    def windows(self, position: int) -> Tensor:
        """Return what inner step `position` of this worker reads: int64, shape (B, T1)."""
        return windows_of(self._corpus, self.spec, stream=self._stream, position=position)

    def train(self, num_steps: int, *, clock: int, clock_steps: int) -> int:
        """Take inner steps on the worker's own data.

        Args:
            num_steps: of this worker.
            clock: nominal inner steps of the whole run before the first of them.
            clock_steps: nominal steps that pass meanwhile: more or fewer for the slow and the fast.

        Returns:
            The tokens trained.
        """
        before = self.state.progress.tokens_total
        for i in range(num_steps):
            windows_BT1 = self.windows(self.state.progress.inner_step)
            self.take_step(windows_BT1, clock=clock + i * clock_steps // num_steps)
        return self.state.progress.tokens_total - before

    def take_step(self, windows_BT1: Tensor, *, clock: int) -> float:
        """Take one inner step on given windows, at an instant of the learning rate's clock.

        Returns:
            The mean loss over the windows before the step, nats per token.
        """
        # The schedule is by round; in the lab a "round" of it is one nominal inner step.
        self.state.progress = msgspec.structs.replace(self.state.progress, round_index=clock)
        result = diloco.train(
            self.state,
            windows_BT1,
            self.spec,
            micro_batch_sequences=micro_batch_sequences(self.spec, len(windows_BT1)),
            device=CPU,
            should_stop=_never,
        )
        assert result is not None  # nothing tells it to stop
        return result.loss

    def contribute(self, *, base: str, round_index: int) -> Sent:
        """Encode the work since the last contribution, as a trainer does at the end of a round.

        Raises:
            TrainerError: nothing was trained, or the weights are broken.
            ContributionRejectedError: the weights have run away.
        """
        kept: list[EncodedGradient] = []

        def store(gradient: EncodedGradient) -> tuple[str, int]:
            kept.append(gradient)
            blob = self.blob_of(gradient, round_index)
            return blake3(blob).hexdigest(), len(blob)

        encoded = diloco.contribute(
            self.state,
            Contribute(base=base, round_index=round_index),
            self.spec,
            codec=RunCodec(self.spec.codec, round_index),
            store_blob=store,
        )
        if encoded is None:
            raise TrainerError(f"{self.author} has trained nothing in round {round_index}")
        sent = Sent(
            contribution_id=f"{self.author}/{self.state.progress.inner_step}",
            author=self.author,
            encoded=encoded,
            gradient=kept[0],
        )
        self._own[sent.contribution_id] = sent
        return sent

    def blob_of(self, gradient: EncodedGradient, round_index: int) -> bytes:
        """Return the blob in which this worker would publish `gradient`."""
        key = BlobKey(
            run_id=self.spec.run_id,
            module_id=DENSE_MODULE,
            author=self.author,
            round_index=round_index,
            codec=self.spec.codec,
            num_elements=gradient.num_elements,
        )
        return write_contribution_blob(gradient, key)

    def rebase(
        self, weights_P: Tensor, *, commit: str, round_index: int, pending: tuple[str, ...] = ()
    ) -> None:
        """Stand on new shared weights; unlisted contributions go back into the local ones.

        Args:
            weights_P: G, shape (P,).
            commit: a name for it.
            round_index: its height.
            pending: ids of own contributions that no commit has listed, nor one that carries them.
        """
        known = tuple(sent.encoded.blob_id for sent in self._own.values())
        command = Rebase(
            commit_id=commit,
            round_index=round_index,
            state_hash=commit,
            pending=pending,
            works=tuple(sent.own_work for sent in self._own.values()),
            known_contributions=known,
        )
        diloco.rebase(self.state, command, weights_P, load_quantised=self._load_quantised)

    def forget(self, contribution_ids: tuple[str, ...]) -> None:
        """Let go of the blobs of own contributions that can no longer become pending."""
        for contribution_id in contribution_ids:
            self._own.pop(contribution_id, None)

    def _load_quantised(self, work: OwnWork) -> Tensor:
        return compression.decode(self._own[work.contribution_id].gradient)


def _never() -> bool:
    return False


def mean_of(vectors: Sequence[Tensor]) -> Tensor:
    """Return the mean of vectors of one shape, summed in fp64 in list order, as fp32."""
    total = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector in vectors:
        total += vector
    return (total / len(vectors)).to(torch.float32)
