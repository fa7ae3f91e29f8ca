"""How many sequences go through the device at a time: what fits, and is over soon enough.

Runs in: trainer.
"""

from __future__ import annotations

import logging

from volunteer.errors import OutOfGpuMemoryError
from volunteer.run import RunSpec
from volunteer.training.devices import Device
from volunteer.training.pace import MicroBatchWatch

MICRO_BATCH_TOKENS = {"cpu": 1024}
"""By kind of device. On CPUs about 0.1 s of the built-in run: a stop is seen soon, and larger
micro-batches were no faster."""
MICRO_BATCH_TOKENS_ACCELERATOR = 16384
"""Fills a GPU; halved where its memory does not suffice, or where it takes too long."""

_log = logging.getLogger(__name__)


class MicroBatches:
    """The size of this process's micro-batches; it only goes down."""

    def __init__(self, spec: RunSpec, device: Device) -> None:
        """Begin with what usually fits."""
        kind = device.torch_device.type
        num_tokens = MICRO_BATCH_TOKENS.get(kind, MICRO_BATCH_TOKENS_ACCELERATOR)
        most = min(spec.inner.batch_sequences, num_tokens // spec.model.context_tokens)
        self.sequences = max(1, most)
        """Of one backward pass."""
        self._device_name = device.name
        self._watch = MicroBatchWatch()
        self._has_fitted = False
        """Whether a step has had enough memory: less is then for others' sake."""
        self._is_squeezed = False
        """Whether others have taken memory since, and half a micro-batch made room once."""

    def note_begin(self, now_s: float) -> None:
        """A micro-batch begins."""
        self._watch.note_begin(now_s)

    def note_step(self, now_s: float, *, is_whole: bool) -> None:
        """A step has ended; smaller ones come next where these take too long to stop between."""
        self._watch.note_end(now_s)
        self._has_fitted |= is_whole
        if self._watch.take_verdict() and self.sequences > 1:
            self.sequences //= 2
            _log.info("slow here: micro_batch_sequences=%d", self.sequences)

    def halve(self, error: BaseException) -> None:
        """Try with less memory: down to one sequence at the start, once when it has fitted before.

        Others who need more and more of it are then left alone.

        Raises:
            OutOfGpuMemoryError: it cannot, or should not, be tried with less.
        """
        if self._is_squeezed:
            raise OutOfGpuMemoryError(
                f"{self._device_name} has less and less free memory: {error}"
            ) from error
        if self.sequences == 1:
            raise OutOfGpuMemoryError(
                f"{self._device_name} has too little free memory for one sequence: {error}"
            ) from error
        self._watch = MicroBatchWatch()
        self._is_squeezed = self._has_fitted
        self.sequences //= 2
        _log.warning("out of memory: micro_batch_sequences=%d", self.sequences)
