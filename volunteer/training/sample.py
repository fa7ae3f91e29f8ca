"""The sampler process: text from the current shared weights, once.

Runs in: sampler (`python -m volunteer.training.sample`), at the owner's wish, on the CPU at the
lowest priority. One command comes on stdin and one event goes to stdout; the log is stderr. What
the owner asks is on no command line and in no log. It ends when stdin ends or the agent dies.

The keys and values of the tokens so far are kept, so that a token costs one position and not the
whole window. When the model's context is full, its older half is given up and the rest is read
anew: every token is predicted from the context that `model.forward` would get.

Shape legend: T tokens fed at once, C the model's context, and model.py's.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import torch
import torch.nn.functional as F
from torch import Tensor

from p2p.blobstore import BlobStore, is_blob_id
from p2p.errors import BlobCorruptError, BlobUnavailableError, P2PError
from volunteer.errors import TrainerError, VolunteerError
from volunteer.logs import set_up_log
from volunteer.messages import (
    MAX_LINE_BYTES,
    Generate,
    Generated,
    SamplerEvent,
    SamplerFailed,
    generate_decoder,
    parse_line,
)
from volunteer.rounds.records import DENSE_MODULE
from volunteer.run import ModelSpec, RunSpec, read_run_spec
from volunteer.training.child_process import (
    EventWriter,
    claim_stdout,
    end_with_parent,
    lower_priority,
    read_lines,
)
from volunteer.training.layout import num_parameters
from volunteer.training.model import (
    RopeTables,
    Weights,
    attend,
    layer_weights,
    leave_layer,
    project_heads,
    read_out,
    rope_tables,
    weights_of,
)
from volunteer.training.state import read_state
from volunteer.training.tokenizer import load_tokenizer

START = b"\n"
"""What the model is given where the prompt is empty: texts begin after a line's end."""
_NICENESS = 19

_log = logging.getLogger(__name__)


class Reader:
    """Reads tokens one after the other and predicts the next."""

    def __init__(self, weights: Weights, model: ModelSpec) -> None:
        """Begin with nothing read.

        Args:
            weights: the named parameters, on the CPU.
            model: their shape.

        Cost: 2 C D elements a layer.
        """
        self._weights, self._model = weights, model
        self._tokens: list[int] = []
        embedding = weights["embedding"]
        shape = (model.num_layers, 2, 1, model.kv_heads, model.context_tokens, model.head_dim)
        self._cache_L2BKCH = embedding.new_zeros(shape)
        """Keys, then values, of each layer at each position read."""
        self._tables = rope_tables(
            model.context_tokens, model.head_dim, model.rope_base, embedding.dtype, embedding.device
        )

    def read(self, tokens: Sequence[int]) -> Tensor:
        """Take in `tokens` (at least one) and return logits_V of the one that follows."""
        context = self._model.context_tokens
        if self._tokens and len(tokens) == 1 and len(self._tokens) < context:
            self._tokens += tokens
            return self._read_at(len(self._tokens) - 1, tokens)
        window = [*self._tokens, *tokens]
        if len(window) > context:
            window = window[-max(1, context // 2) :]
        self._tokens = window
        return self._read_at(0, window)

    def _read_at(self, start: int, tokens: Sequence[int]) -> Tensor:
        """Read `tokens` at positions start..; all from 0, or a single one after the others."""
        weights, model = self._weights, self._model
        stop = start + len(tokens)
        tables = RopeTables(*(table_CH[start:stop] for table_CH in self._tables))
        x_BTD = F.embedding(torch.tensor([tokens]), weights["embedding"])
        for i in range(model.num_layers):
            layer = layer_weights(weights, i)
            q_BNTH, k_BKTH, v_BKTH = project_heads(x_BTD, layer, tables, model.head_dim)
            keys_BKCH, values_BKCH = self._cache_L2BKCH[i]
            keys_BKCH[:, :, start:stop] = k_BKTH
            values_BKCH[:, :, start:stop] = v_BKTH
            mixed_BNTH = attend(
                q_BNTH, keys_BKCH[:, :, :stop], values_BKCH[:, :, :stop], is_causal=start == 0
            )
            x_BTD = leave_layer(x_BTD, mixed_BNTH, layer)
        return read_out(weights, x_BTD[0, -1])


def generate(
    weights: Weights,
    model: ModelSpec,
    prompt: bytes,
    *,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> bytes:
    """Return `num_tokens` bytes that the model writes after `prompt`.

    The same arguments give the same bytes on one machine with one number of threads.

    Args:
        weights: the named parameters, on the CPU.
        model: their shape; its tokens are bytes.
        prompt: any length; the model sees as much of its end as its context holds.
        num_tokens: at least 1.
        temperature: what logits are divided by; 0 takes the likeliest byte each time.
        seed: of the draws.

    Raises:
        TrainerError: a logit is not finite: the weights are broken.
    """
    written = generate_tokens(
        weights,
        model,
        list(prompt or START),
        num_tokens=num_tokens,
        temperature=temperature,
        seed=seed,
    )
    return bytes(written)


def generate_tokens(
    weights: Weights,
    model: ModelSpec,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """Return `num_tokens` tokens that the model writes after `prompt`; as `generate`.

    Raises:
        TrainerError: a logit is not finite: the weights are broken.
    """
    generator = torch.Generator().manual_seed(seed)
    written: list[int] = []
    with torch.no_grad():
        reader = Reader(weights, model)
        logits_V = reader.read(prompt[-model.context_tokens :])
        while True:
            written.append(choose_token(logits_V, temperature, generator))
            if len(written) == num_tokens:
                return written
            logits_V = reader.read(written[-1:])


def choose_token(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token from softmax(logits / temperature), in fp64.

    Raises:
        TrainerError: a logit is not finite.
    """
    if not bool(torch.isfinite(logits_V).all()):
        raise TrainerError("the model's output is not finite: these weights are broken")
    if temperature == 0.0:
        return int(logits_V.argmax())
    # Less the largest first, so that no temperature makes one of them infinite.
    scaled_V = (logits_V.double() - logits_V.max()) / temperature
    return int(torch.multinomial(scaled_V.softmax(-1), 1, generator=generator))


def answer(spec: RunSpec, store: BlobStore, state_hash: str, command: Generate) -> Generated:
    """Write what `command` asks for with the weights of a state in `store`.

    Raises:
        BlobUnavailableError: the state is not there.
        BlobCorruptError: the disk has damaged it.
        VolunteerError: it is not a state of this run, or its weights are broken.
        OSError: it cannot be read.
    """
    if not is_blob_id(state_hash) or not store.has(state_hash):
        raise BlobUnavailableError("the shared weights are not on this disk any more")
    if not store.verify(state_hash):
        raise BlobCorruptError("the shared weights are damaged on this disk")
    state = read_state(store.file_of(state_hash), num_parameters(spec.model))
    tokenizer = load_tokenizer(spec, store)
    prompt = tokenizer.encode(command.prompt.encode() or START).tokens.tolist()
    written = generate_tokens(
        weights_of(state.weights_P, spec.model),
        spec.model,
        prompt or [0],  # where the tokenizer leaves out white space
        num_tokens=command.max_tokens,
        temperature=command.temperature,
        seed=command.seed,
    )
    text = tokenizer.decode(written).decode("utf-8", errors="replace")
    return Generated(text=text, num_tokens=len(written))


def _answer_line(run_dir: Path, module_id: str, state_hash: str, line: bytes) -> SamplerEvent:
    try:
        command = parse_line(line, generate_decoder)
        spec = read_run_spec(run_dir / "spec.toml")
        store = BlobStore(run_dir / "modules" / module_id / "blobs")
        return answer(spec, store, state_hash, command)
    except (VolunteerError, P2PError, OSError, ValueError) as error:
        return SamplerFailed(message=str(error), hint=getattr(error, "hint", ""))


def _end_when_closed(stdin: BinaryIO) -> None:
    """End the process at the end of `stdin`, in a thread of its own."""

    def wait() -> None:
        while stdin.read(65536):
            pass
        os._exit(1)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer one command; return the exit status: 0 answered, 1 not."""
    parser = argparse.ArgumentParser(prog="sample", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--module", default=DENSE_MODULE)
    parser.add_argument("--state-hash", required=True)
    options = parser.parse_args(arguments)
    set_up_log(None)
    events = EventWriter(claim_stdout(), on_closed=lambda: os._exit(1))
    end_with_parent(lambda: os._exit(1))
    lower_priority(_NICENESS)
    torch.set_num_threads(1)
    # Not sys.stdin: a thread that waits in it makes the interpreter abort when it ends.
    stdin = os.fdopen(os.dup(0), "rb")
    line = next(read_lines(stdin, MAX_LINE_BYTES), None)
    if line is None:
        return 1
    _end_when_closed(stdin)
    try:
        event = _answer_line(options.run_dir, options.module, options.state_hash, line)
    except Exception as error:  # noqa: BLE001 - process boundary: the agent hears of everything
        _log.exception("the sampler cannot go on")
        event = SamplerFailed(message=f"{type(error).__name__}: {error}", hint="")
    events.emit(event)
    return int(isinstance(event, SamplerFailed))


if __name__ == "__main__":
    sys.exit(main())
