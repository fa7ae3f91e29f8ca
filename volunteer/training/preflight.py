"""One micro-batch of full size before the first step, which so cannot run out of memory later.

Runs in: trainer. Forward, backward and the optimizer's scratch are gone through with the real
weights, which stay as they are; the gradient is zero again afterwards. What does not fit is halved
(micro_batches.py), and so is, on a CPU, what takes so long that a stop would not be seen soon; how
it went is told to the owner.

On a CPU the system has no room to refuse: it lets a process take too much, and then ends one. So
what a micro-batch needs is reckoned there before it is tried, and halved if it is more than half
of what is free: the owner's programs need some, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from volunteer.micro_batch import MicroBatch
from volunteer.run import RunSpec
from volunteer.training import memory
from volunteer.training.acceleration import is_compiler_failure
from volunteer.training.devices import Device, is_out_of_memory, release_cached_memory
from volunteer.training.inner import allocate_scratch
from volunteer.training.micro_batches import MicroBatches
from volunteer.training.model import TrainableWeights
from volunteer.training.pace import MAX_MICRO_BATCH_S

_MOST_OF_FREE = 0.5
_GB, _MB = 1e9, 1e6

_log = logging.getLogger(__name__)


def find_micro_batch(
    weights: TrainableWeights,
    windows_BT1: Tensor,
    spec: RunSpec,
    device: Device,
    batches: MicroBatches,
    *,
    should_stop: Callable[[], bool],
    now_s: Callable[[], float],
) -> MicroBatch | None:
    """Try micro-batches of full size until one fits.

    Args:
        weights: unchanged; the gradient is zero afterwards.
        windows_BT1: int64, of a whole step, on the device.
        spec: the run.
        device: where the weights live.
        batches: what is tried first, and what fits at last.
        should_stop: asked before each trial.
        now_s: a monotonic clock.

    Returns:
        What the owner should know; None if told to stop.

    Raises:
        OutOfGpuMemoryError: not one sequence fits.
    """
    free_bytes = memory.free_bytes(device.torch_device)
    memory.reset_peak(device.torch_device)
    _make_plausible(batches, device, free_bytes)
    first_at_s = now_s()
    while not should_stop():
        began_at_s = now_s()
        error = _try_once(weights, windows_BT1, spec, device, batches)
        # Only here is what a failed trial held in memory free.
        weights.gradient_P.zero_()
        if error is None:
            ended_at_s = now_s()
            batches.note_fits()
            batches.note_trial(ended_at_s - began_at_s)
            used_bytes = memory.peak_bytes(device.torch_device)
            compiled_in_s = ended_at_s - first_at_s if batches.is_compiled else 0.0
            found = _describe(batches, spec, free_bytes, used_bytes, compiled_in_s)
            _log.info("micro-batch: %s", found.note)
            return found
        release_cached_memory(device.torch_device)
        if is_compiler_failure(error):
            batches.give_up_compiling(error)
        else:
            batches.halve(error)
    return None


def _make_plausible(batches: MicroBatches, device: Device, free_bytes: int | None) -> None:
    """Halve, on a CPU, what would clearly take too much."""
    if device.torch_device.type != "cpu" or free_bytes is None:
        return
    while batches.needed_bytes > _MOST_OF_FREE * free_bytes:
        batches.halve(MemoryError(f"about {batches.needed_bytes / _MB:,.0f} MB would be needed"))


def _try_once(
    weights: TrainableWeights,
    windows_BT1: Tensor,
    spec: RunSpec,
    device: Device,
    batches: MicroBatches,
) -> Exception | None:
    """Go through a step's largest micro-batch; return what went wrong, without its traceback."""
    sizes = {len(micro) for micro in torch.split(windows_BT1, batches.sequences)}
    # A compiled layer is compiled for each of them that it does not know.
    wanted = sorted(sizes, reverse=True) if batches.is_compiled else [max(sizes)]
    try:
        for size in wanted:
            with device.autocast():
                loss = batches.loss_function(weights.parameters, windows_BT1[:size], spec.model)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no type for it
            float(loss.detach())  # waits for the device
        allocate_scratch(weights.weights_P, spec.model, spec.inner)
    except (RuntimeError, MemoryError) as error:
        if not (is_out_of_memory(error) or is_compiler_failure(error)):
            raise
        # Its frames would keep what they hold.
        return error.with_traceback(None)
    return None


def _describe(
    batches: MicroBatches,
    spec: RunSpec,
    free_bytes: int | None,
    used_bytes: int,
    compiled_in_s: float,
) -> MicroBatch:
    context_tokens = spec.model.context_tokens
    parts = [size_text(batches.sequences, context_tokens), f"{_size(used_bytes)} used"]
    if free_bytes is not None:
        parts.append(f"{_size(free_bytes)} were free before")
    if batches.tried:
        parts.append(f"{', '.join(map(str, batches.tried))} did not fit")
    if batches.too_slow:
        parts.append(f"{batches.too_slow} took longer than {MAX_MICRO_BATCH_S:g} s")
    if batches.is_checkpointed:
        parts.append("layers are computed twice to save memory")
    if batches.is_compiled:
        parts.append(f"layers are compiled ({compiled_in_s:.0f} s)")
    if batches.why_not_compiled:
        parts.append(f"layers are not compiled, as wished: {batches.why_not_compiled}")
    return MicroBatch(
        sequences=batches.sequences,
        context_tokens=context_tokens,
        tried=batches.tried,
        free_bytes=free_bytes,
        used_bytes=used_bytes,
        is_checkpointed=batches.is_checkpointed,
        is_compiled=batches.is_compiled,
        note="; ".join(parts),
    )


def size_text(sequences: int, context_tokens: int) -> str:
    """Return `4 sequences of 128 tokens at a time`."""
    one_or_more = "sequence" if sequences == 1 else "sequences"
    return f"{sequences} {one_or_more} of {context_tokens} tokens at a time"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GB:.1f} GB" if num_bytes >= _GB else f"{num_bytes / _MB:.0f} MB"
