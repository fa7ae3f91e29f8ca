"""How many sequences go through the device at a time: what fits, and is over soon enough.

Runs in: trainer. preflight.py finds out what fits before the first step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from volunteer.errors import OutOfGpuMemoryError
from volunteer.presets import sequence_bytes
from volunteer.run import RunSpec
from volunteer.training.acceleration import make_loss_function, reason_of
from volunteer.training.devices import Device
from volunteer.training.model import LossFunction
from volunteer.training.pace import MAX_MICRO_BATCH_S, MicroBatchWatch

MICRO_BATCH_TOKENS = {"cpu": 1024}
"""By kind of device. On CPUs about 0.1 s of the built-in run: a stop is seen soon, and larger
micro-batches were no faster."""
MICRO_BATCH_TOKENS_ACCELERATOR = 16384
"""Fills a GPU; halved where its memory does not suffice, or where it takes too long."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """How the owner wants layers to be computed (acceleration.py)."""

    is_compiled: bool = False
    checkpointing: str = "off"
    """`on`, `off`, or `auto`: where not one sequence fits without."""


class MicroBatches:
    """The size of this process's micro-batches, which only goes down, and how they are computed."""

    def __init__(self, spec: RunSpec, device: Device, wishes: Wishes | None = None) -> None:
        """Begin with what usually fits."""
        wishes = wishes or Wishes()
        kind = device.torch_device.type
        num_tokens = MICRO_BATCH_TOKENS.get(kind, MICRO_BATCH_TOKENS_ACCELERATOR)
        most = min(spec.inner.batch_sequences, num_tokens // spec.model.context_tokens)
        self._most = max(1, most)
        self._model = spec.model
        self.sequences = self._most
        """Of one backward pass."""
        self.is_compiled = wishes.is_compiled
        self.is_checkpointed = wishes.checkpointing == "on"
        self.why_not_compiled = ""
        """Where the owner wishes it and it is not possible."""
        self.tried: tuple[int, ...] = ()
        """What did not fit."""
        self.too_slow = 0
        """What fitted in the trial and took too long; 0 if it did not."""
        self._is_cpu = kind == "cpu"
        self._may_checkpoint = wishes.checkpointing == "auto"
        self._device_name = device.name
        self._watch = MicroBatchWatch()
        self._has_fitted = False
        """Whether a step has had enough memory: less is then for others' sake."""
        self._is_squeezed = False
        """Whether others have taken memory since, and half a micro-batch made room once."""

    @property
    def loss_function(self) -> LossFunction:
        """What computes a micro-batch's loss now."""
        return make_loss_function(
            is_compiled=self.is_compiled, is_checkpointed=self.is_checkpointed
        )

    @property
    def needed_bytes(self) -> int:
        """About what a backward pass needs beside the vectors, in fp32."""
        return self.sequences * sequence_bytes(self._model, is_checkpointed=self.is_checkpointed)

    def note_begin(self, now_s: float) -> None:
        """A micro-batch begins."""
        self._watch.note_begin(now_s)

    def note_fits(self) -> None:
        """Such a micro-batch has had enough memory."""
        self._has_fitted = True

    def note_trial(self, duration_s: float) -> None:
        """The trial has fitted; what follows is smaller if it took too long.

        Somebody who comes and goes lets a trainer live for a step or two: what is found out step by
        step (`note_step`) would come too late each time. On a CPU a process's first micro-batch
        takes hardly longer than others, and smaller ones cost little. Elsewhere, and where layers
        are compiled in it, it says nothing about those to come.
        """
        if not self._is_cpu or self.is_compiled or duration_s <= MAX_MICRO_BATCH_S:
            return
        self.too_slow = self.sequences if self.sequences > 1 else 0
        while self.sequences > 1 and duration_s > MAX_MICRO_BATCH_S:
            self.sequences //= 2
            duration_s /= 2

    def note_step(self, now_s: float, *, is_whole: bool) -> bool:
        """A step has ended; return whether smaller ones come next, since these take too long."""
        self._watch.note_end(now_s)
        self._has_fitted |= is_whole
        if self._watch.take_verdict() and self.sequences > 1:
            self.sequences //= 2
            _log.info("slow here: micro_batch_sequences=%d", self.sequences)
            return True
        return False

    def give_up_compiling(self, error: BaseException) -> None:
        """Train on as layers are written: this machine cannot compile them."""
        self.is_compiled = False
        self.why_not_compiled = reason_of(error)
        _log.warning("layers are not compiled, as `compile` wishes: %s", self.why_not_compiled)

    def halve(self, error: BaseException) -> None:
        """Try with less memory: down to one sequence at the start, once when it has fitted before.

        Others who need more and more of it are then left alone. Where not one sequence fits, and
        the owner leaves it open, layers are computed twice instead of kept.

        Raises:
            OutOfGpuMemoryError: it cannot, or should not, be tried with less.
        """
        if self._is_squeezed:
            raise OutOfGpuMemoryError(
                f"{self._device_name} has less and less free memory: {error}"
            ) from error
        self.tried += (self.sequences,)
        if self.sequences > 1:
            self.sequences //= 2
        elif self._may_checkpoint and not self.is_checkpointed and not self._has_fitted:
            self.is_checkpointed, self.sequences = True, self._most
        else:
            raise OutOfGpuMemoryError(
                f"{self._device_name} has too little free memory for one sequence: {error}"
            ) from error
        self._watch = MicroBatchWatch()
        self._is_squeezed = self._has_fitted
        _log.warning(
            "out of memory: micro_batch_sequences=%d checkpointed=%s",
            self.sequences,
            self.is_checkpointed,
        )
