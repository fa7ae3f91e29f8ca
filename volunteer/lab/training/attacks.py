"""What an attacker of the lab sends in the place of his work.

Runs in: lab. Pure, but for the attacker's memory.

An attacker trains as everyone does, so that his norm and his tokens are believable, and forges what
he publishes. What the others do about it is the program's (training/weighing.py), not the lab's.

Shape legend: P parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from volunteer.lab.training.worker import Sent, Worker, mean_of
from volunteer.training import compression
from volunteer.training.compression import EncodedGradient

Attack = Literal["-10 D", "-20 D", "noise", "stale", "copied", "spikes"]
"""`-10 D`, `-20 D`: its own work times that; `noise`: normal, of its own work's norm; `stale`: the
content of its first contribution, again and again; `copied`: an honest one's content of the same
round; `spikes`: its own work, but in one element of a hundred, for each attacker other ones, large
values against the honest ones' mean, together of its work's norm: that passes every filter."""
SPIKE_PART = 100
_FACTORS: dict[Attack, float] = {"-10 D": -10.0, "-20 D": -20.0}


class Attacker:
    """One worker's forger."""

    def __init__(self, kind: Attack, seed: int) -> None:
        """Begin with nothing remembered.

        Args:
            kind: of attack.
            seed: of the noise.
        """
        self._kind = kind
        self._rng = np.random.default_rng(seed)
        self._first: EncodedGradient | None = None

    def forge(self, own: Sent, worker: Worker, honest: Sequence[Sent]) -> Sent:
        """Return what is sent instead of `own`.

        Args:
            own: the attacker's true contribution.
            worker: the attacker's.
            honest: the others' of this round.
        """
        if self._first is None:
            self._first = own.gradient
        if self._kind == "copied":
            copied = _with_content(own, worker, honest[0].gradient)
            return replace(copied, copy_of=honest[0].contribution_id)
        if self._kind == "stale":
            return _with_content(own, worker, self._first)
        decoded_P = compression.decode(own.gradient)
        if self._kind == "noise":
            forged_P = self._noise(decoded_P)
        elif self._kind == "spikes":
            mean_P = mean_of([compression.decode(one.gradient) for one in honest])
            forged_P = _spikes(decoded_P, mean_P, worker.index)
        else:
            forged_P = decoded_P * _FACTORS[self._kind]
        return _with_content(
            own, worker, compression.encode(forged_P, worker.spec.codec, own.encoded.round_index)
        )

    def _noise(self, decoded_P: Tensor) -> Tensor:
        noise_P = torch.from_numpy(self._rng.standard_normal(len(decoded_P), dtype=np.float32))
        scale = float(torch.linalg.vector_norm(decoded_P) / torch.linalg.vector_norm(noise_P))
        return noise_P * scale


def _spikes(decoded_P: Tensor, mean_P: Tensor, first: int) -> Tensor:
    chosen = torch.arange(first % SPIKE_PART, len(decoded_P), SPIKE_PART)
    forged_P = decoded_P.clone()
    size = float(torch.linalg.vector_norm(decoded_P)) / len(chosen) ** 0.5
    forged_P[chosen] = -torch.sign(mean_P[chosen]) * size
    return forged_P


def _with_content(own: Sent, worker: Worker, gradient: EncodedGradient) -> Sent:
    blob = worker.blob_of(gradient, own.encoded.round_index)
    encoded = msgspec.structs.replace(
        own.encoded, blob_id=blake3(blob).hexdigest(), blob_bytes=len(blob)
    )
    return Sent(
        contribution_id=own.contribution_id,
        author=own.author,
        encoded=encoded,
        gradient=gradient,
    )
