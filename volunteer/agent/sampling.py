"""Text from the current shared weights, in a process of its own for each request.

Runs in: agent. It works while contributing is paused: the owner asks for it by name.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import trio

from volunteer.agent.child import Child
from volunteer.errors import ControlError
from volunteer.messages import (
    Generate,
    Generated,
    SamplerEvent,
    SamplerFailed,
    sampler_event_decoder,
)

log = logging.getLogger(__name__)
SAMPLE_DEADLINE_S = 60.0
"""From the request to the text, PyTorch's start at the lowest priority included."""


class Sampler:
    """Starts one sampler at a time."""

    def __init__(self, run_dir: Path, module_id: str, log_file: Path) -> None:
        """Serve one module of one run."""
        self._argv = [sys.executable, "-P", "-m", "volunteer.training.sample"]
        self._argv += ["--run-dir", str(run_dir), "--module", module_id]
        self._log_file = log_file
        self._is_busy = False

    async def sample(self, state_hash: str, request: Generate) -> Generated:
        """Return what the weights of `state_hash` write.

        Raises:
            ControlError: one is made already, it takes too long, or the sampler cannot do it.

        Cancellation: the process has ended when this returns.
        """
        if self._is_busy:
            raise ControlError("a sample is being made already", hint="try again in a minute")
        self._is_busy = True
        try:
            with trio.move_on_after(SAMPLE_DEADLINE_S):
                return await self._run_once(state_hash, request)
        finally:
            self._is_busy = False
        raise ControlError(
            f"no text within {SAMPLE_DEADLINE_S:g} s: the machine is busy, or the model is large",
            hint="ask for less with --max-tokens",
        )

    async def _run_once(self, state_hash: str, request: Generate) -> Generated:
        replies: list[SamplerEvent] = []

        async def take(event: SamplerEvent) -> None:
            await trio.lowlevel.checkpoint()
            replies.append(event)

        argv = [*self._argv, "--state-hash", state_hash]
        try:
            child = await Child.start(argv, self._log_file, sampler_event_decoder, "sampler")
        except OSError as error:
            raise ControlError(f"the sampler cannot be started: {error}") from error
        child.send(request)
        status = await child.run(take)
        match replies:
            case [Generated() as generated]:
                return generated
            case [SamplerFailed(message=message, hint=hint)]:
                raise ControlError(message, hint=hint)
            case _:
                log.error("sampler ended with status=%d and no answer", status)
                hint = f"see {self._log_file}"
                raise ControlError(f"the sampler ended with exit status {status}", hint=hint)
