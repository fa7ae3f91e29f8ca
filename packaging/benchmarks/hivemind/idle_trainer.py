"""A trainer that takes no inner steps: it waits, moves its weights at once, and obeys as ever.

Started by idle_agent.py in the place of `python -m volunteer.training.trainer`, with the same
arguments. All but the inner steps is the real thing: pseudo-gradient, codec, blob, snapshot,
rebase. So nobody trains on the CPU while the exchange is measured, as nobody does in hivemind's.

A byte in the FIFO `$BENCH_DIR/close` closes the round: the trainer reports as many tokens as the
run's target asks for. What happens when is written to `$BENCH_DIR/marks`.
"""

from __future__ import annotations

import os
import select
import sys

from marks import BENCH_DIR, mark

from volunteer.messages import Contribute, Rebase, StopTrainer
from volunteer.training import trainer, training_loop
from volunteer.training.progress import after_step

STEP = 1e-3
NOISE_ELEMENTS = 2**16
WAIT_S = 0.02
"""For the close, between two looks for a command."""


class IdleLoop(training_loop.TrainingLoop):
    """The real loop, with pretended inner steps."""

    _ready_on = ""
    """The commit on which it has trained and waits for the close."""
    _contributed_on = ""
    _is_closed = False
    _closes_fd = -1

    def _advance(self) -> None:
        base = self._last_rebase.commit_id
        if self._is_closed or base == self._contributed_on:
            self._wait_for_command()
            return
        if base != self._ready_on:
            if self._progress.tokens_since_contribution == 0:
                self._pretend()
            self._ready_on = base
            mark("trained", round_index=self._progress.round_index)
        if select.select([self._closes()], [], [], WAIT_S)[0] and os.read(self._closes(), 1):
            self._is_closed = True
            self._report(self._now_s())

    def _wait_for_command(self) -> None:
        command = self._inbox.next_command(should_wait=True)
        if isinstance(command, StopTrainer):
            self._inbox.put(command)  # for the loop around this
        else:
            self._obey(command)

    def _closes(self) -> int:
        if self._closes_fd < 0:
            # Also for writing, so that it never looks ended.
            self._closes_fd = os.open(BENCH_DIR / "close", os.O_RDWR | os.O_NONBLOCK)
        return self._closes_fd

    def _pretend(self) -> None:
        """Move the weights: in a direction that all share, and one of our own."""
        torch = training_loop.torch
        generator = torch.Generator().manual_seed(self._progress.round_index)
        noise = torch.randn(NOISE_ELEMENTS, generator=generator)
        own_seed = int.from_bytes(self._settings.peer_seed[-4:], "little")
        noise += torch.randn(NOISE_ELEMENTS, generator=generator.manual_seed(own_seed))
        noise *= STEP
        weights_P = self._state.weights.weights_P
        for start in range(0, len(weights_P), NOISE_ELEMENTS):
            piece = weights_P[start : start + NOISE_ELEMENTS]
            piece -= noise[: len(piece)]
        tokens = self._spec.rounds.target_tokens
        self._state.progress = after_step(self._state.progress, num_tokens=tokens)
        self._meter.add_step(1.0, tokens, 1.0)
        self._is_saved = False

    def _contribute(self, command: Contribute) -> None:
        mark("contribute")
        super()._contribute(command)
        self._contributed_on = command.base
        mark("contributed")

    def _save(self) -> None:
        mark("save")
        super()._save()
        mark("saved")

    def _rebase(self, command: Rebase) -> int:
        mark("rebase")
        discarded = super()._rebase(command)
        self._is_closed = False
        mark("rebased", round_index=command.round_index, state_hash=command.state_hash)
        return discarded


if __name__ == "__main__":
    training_loop.TrainingLoop = IdleLoop
    sys.exit(trainer.main())
