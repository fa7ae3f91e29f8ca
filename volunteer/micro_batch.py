"""What the trainer has found out about its micro-batches, for the owner to see.

Runs in: trainer (says), agent, command line (show). Pure.
"""

from __future__ import annotations

import msgspec


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """How many sequences go through the device at a time, and why."""

    sequences: int
    context_tokens: int
    """Of each sequence."""
    tried: tuple[int, ...] = ()
    """Numbers of sequences that were tried before and did not fit."""
    free_bytes: int | None = None
    """Of the device's memory (the machine's, on a CPU) before the trial; None: not known."""
    used_bytes: int | None = None
    """What the trainer has held of it at most since, weights included; None: not measured."""
    is_checkpointed: bool = False
    """Whether activations are computed again in the backward pass, for less memory."""
    is_compiled: bool = False
    note: str = ""
    """What was tried, what was free and what is used, in words."""


class MicroBatchChosen(msgspec.Struct, frozen=True, kw_only=True, tag="micro_batch_chosen"):
    """The trainer's trial before its first step is over, or it has cut its micro-batches since."""

    micro_batch: MicroBatch
