"""Takes inner steps in micro-batches that fit, and tells what is found out about them.

Runs in: trainer. Stage 1 of a round.

While layers are compiled the main thread is deaf for many seconds. A stop that comes meanwhile ends
the process at once, from a thread of its own: nothing was trained yet that the snapshot lacks.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import msgspec
from torch import Tensor

from volunteer.messages import TrainerEvent
from volunteer.micro_batch import MicroBatch, MicroBatchChosen
from volunteer.run import RunSpec
from volunteer.training import diloco
from volunteer.training.acceleration import is_compiler_failure, reason_of
from volunteer.training.devices import Device, is_out_of_memory, release_cached_memory
from volunteer.training.diloco import LocalState
from volunteer.training.inner import StepResult
from volunteer.training.micro_batches import MicroBatches, Wishes
from volunteer.training.pace import MAX_MICRO_BATCH_S
from volunteer.training.preflight import find_micro_batch, size_text

_LOOK_EVERY_S = 0.1


class Stepper:
    """The inner steps of one process."""

    def __init__(
        self,
        spec: RunSpec,
        device: Device,
        wishes: Wishes,
        *,
        should_stop: Callable[[], bool],
        end_at_once: Callable[[], None],
        emit: Callable[[TrainerEvent], None],
        now_s: Callable[[], float],
    ) -> None:
        """Begin with what usually fits.

        Args:
            spec: the run.
            device: where theta lives.
            wishes: how layers are to be computed.
            should_stop: tells whether a stop has come; from any thread.
            end_at_once: ends the process without saving; called while layers are compiled.
            emit: tells the agent.
            now_s: a monotonic clock.
        """
        self._spec = spec
        self._device = device
        self._batches = MicroBatches(spec, device, wishes)
        self._stop_has_come = should_stop
        self._end_at_once = end_at_once
        self._emit = emit
        self._now_s = now_s
        self._found: MicroBatch | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it is known what fits."""
        return self._found is not None

    def prepare(self, state: LocalState, windows_BT1: Tensor) -> None:
        """Find out what fits, and compile; if a stop has come, it is left for the next time.

        Args:
            state: as it was, afterwards.
            windows_BT1: int64, of a whole step, on the device.

        Raises:
            OutOfGpuMemoryError: not one sequence fits.
        """
        with self._ending_if_stopped() if self._batches.is_compiled else contextlib.nullcontext():
            found = find_micro_batch(
                state.weights,
                windows_BT1,
                self._spec,
                self._device,
                self._batches,
                should_stop=self._stop_has_come,
                now_s=self._now_s,
            )
        if found is not None:
            self._tell(found)

    def step(self, state: LocalState, windows_BT1: Tensor) -> StepResult | None:
        """Take one inner step.

        Args:
            state: changed in place, or as it was.
            windows_BT1: int64, shape (B, context_tokens + 1), on the device.

        Returns:
            None if a stop came, or if the step is to be tried again in another way.

        Raises:
            NotFiniteError: loss or gradient is not finite; the state is as before.
            OutOfGpuMemoryError: it cannot be tried with less memory.
        """
        try:
            result = diloco.train(
                state,
                windows_BT1,
                self._spec,
                micro_batch_sequences=self._batches.sequences,
                device=self._device,
                should_stop=self._should_stop,
                loss_function=self._batches.loss_function,
            )
            if self._batches.note_step(self._now_s(), is_whole=result is not None):
                self._tell_cut(f"it took longer than {MAX_MICRO_BATCH_S:g} s")
            return result
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                self._batches.halve(error)
                self._tell_cut("others have taken memory since")
            elif self._batches.is_compiled and is_compiler_failure(error):
                self._batches.give_up_compiling(error)
                self._tell_cut(f"layers are no longer compiled: {reason_of(error)}")
            else:
                raise
        # Only here is what the failed step held in memory free.
        release_cached_memory(self._device.torch_device)
        return None

    def _should_stop(self) -> bool:
        """Tell, before each micro-batch, whether a stop has come."""
        self._batches.note_begin(self._now_s())
        return self._stop_has_come()

    def _tell(self, found: MicroBatch) -> None:
        self._found = found
        self._emit(MicroBatchChosen(micro_batch=found))

    def _tell_cut(self, reason: str) -> None:
        if self._found is None:
            return
        batches, before = self._batches, self._found
        note = size_text(batches.sequences, before.context_tokens)
        self._tell(
            msgspec.structs.replace(
                before,
                sequences=batches.sequences,
                tried=batches.tried,
                is_checkpointed=batches.is_checkpointed,
                is_compiled=batches.is_compiled,
                note=f"{note}, {before.sequences} before: {reason}",
            )
        )

    @contextlib.contextmanager
    def _ending_if_stopped(self) -> Iterator[None]:
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(_LOOK_EVERY_S):
                if self._stop_has_come():
                    self._end_at_once()
                    return

        thread = threading.Thread(target=watch, name="compiling", daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
