"""Measure our inner loop beside a plain one: tokens a second, and CPU-seconds a token.

PYTHONPATH=. python packaging/benchmarks/bench_inner_loop.py [--shape commons 25m] [--compile]

Ours is `diloco.train` as the trainer calls it; the plain one is plain_loop.py: the same model from
the same weights on the same windows, in the same micro-batches. Each has a process of its own; they
take turns, so that what else the machine does meets both. Medians over the turns are compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:  # torch reads OMP_WAIT_POLICY when it is imported
    from torch import Tensor

    from volunteer.run import RunSpec

NUM_TURNS = 12
NUM_BATCHES = 16
SIDES = ("ours", "plain")
_TURN_S = {"commons": 1.5, "25m": 3.0}
"""A turn is as many steps as take about so long."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side did in its turn."""

    tokens: int
    wall_s: float
    cpu_s: float
    loss: float


class Side:
    """A child process that takes steps when told."""

    def __init__(self, name: str, options: argparse.Namespace, shape: str) -> None:
        """Start it, and wait until it has taken its first step."""
        self.name = name
        argv = [sys.executable, __file__, "--side", name, "--shape", shape]
        argv += ["--threads", str(options.threads)]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ready = self._answer()

    def take_turn(self, num_steps: int) -> Turn:
        """Take steps while all others rest."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{num_steps}\n")
        self._process.stdin.flush()
        return msgspec.convert(self._answer(), Turn)

    def end(self) -> None:
        """Let it end."""
        self._process.communicate()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended")
        answer: dict[str, float] = json.loads(line)
        return answer


def compare(shape: str, options: argparse.Namespace) -> None:
    """Let the sides take turns, and print what came of it."""
    names = [*SIDES, *(f"{side}-compiled" for side in SIDES if options.compile)]
    sides = [Side(name, options, shape) for name in names]
    num_steps = max(1, round(_TURN_S.get(shape, 3.0) / sides[0].ready["step_s"]))
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    for turn in range(options.turns):
        # Whoever comes first in one turn comes last in the next.
        for side in sides if turn % 2 == 0 else sides[::-1]:
            turns[side.name].append(side.take_turn(num_steps))
    for side in sides:
        side.end()
    print(f"{shape}: {options.turns} turns of {num_steps} steps, {options.threads} threads")
    print("side            first_loss  last_loss  prepared_s  tokens/s  cpu_us/token  of_plain")
    cost = {name: statistics.median(t.cpu_s / t.tokens for t in turns[name]) for name in names}
    for side in sides:
        seen = turns[side.name]
        speed = statistics.median(t.tokens / t.wall_s for t in seen)
        plain = cost[side.name.replace("ours", "plain")]
        print(
            f"{side.name:<15} {side.ready['loss']:10.5f} {seen[-1].loss:10.5f}"
            f" {side.ready['prepared_s']:11.1f} {speed:9.0f} {cost[side.name] * 1e6:13.2f}"
            f" {cost[side.name] / plain:9.3f}"
        )
    ratios = [
        (ours.cpu_s / ours.tokens) / (plain.cpu_s / plain.tokens)
        for ours, plain in zip(turns["ours"], turns["plain"], strict=True)
    ]
    print(f"ours/plain by turn: {min(ratios):.3f} to {max(ratios):.3f}\n", flush=True)


def run_side(name: str, shape: str, num_threads: int) -> None:
    """Be a side: take as many steps as each line of stdin says."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the trainer has it
    with tempfile.TemporaryDirectory(prefix=f"bench-{name}-") as folder:
        take_turns(lambda: make_step(name, shape, num_threads, Path(folder)))


def take_turns(make: Callable[[], Callable[[], tuple[float, int]]]) -> None:
    """Make what takes a step, and take as many as each line of stdin says."""
    started_s = time.monotonic()
    step = make()
    loss, _ = step()
    prepared_s = time.monotonic() - started_s
    began_s = time.monotonic()
    step()
    tell({"loss": loss, "prepared_s": prepared_s, "step_s": time.monotonic() - began_s})
    for line in sys.stdin:
        wall_s, cpu_s = time.monotonic(), time.process_time()
        tokens = 0
        for _ in range(int(line)):
            loss, num_tokens = step()
            tokens += num_tokens
        tell(
            {
                "tokens": tokens,
                "wall_s": time.monotonic() - wall_s,
                "cpu_s": time.process_time() - cpu_s,
                "loss": loss,
            }
        )


def tell(answer: dict[str, float]) -> None:
    """Send a line to the parent."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def spec_of(shape: str) -> RunSpec:
    """Return `commons`, in another shape where one is named, at its full learning rate."""
    from volunteer.data.builtin import load_builtin_run
    from volunteer.presets import PRESETS

    spec = load_builtin_run("commons")
    if shape in PRESETS:
        inner = msgspec.structs.replace(spec.inner, batch_sequences=8)
        spec = msgspec.structs.replace(spec, model=PRESETS[shape], inner=inner)
    # The learning rate of all steps: ours takes its from the schedule, which is at its top here.
    return msgspec.structs.replace(spec, inner=msgspec.structs.replace(spec.inner, warmup_steps=0))


def batches_of(spec: RunSpec) -> list[Tensor]:
    """Return what both sides read: token ids, int64, shape (batch, context + 1) each."""
    import torch

    from volunteer.training.data import load_corpus, training_windows

    corpus = load_corpus(spec.data)
    return [
        torch.from_numpy(
            training_windows(
                corpus,
                run_id=spec.run_id,
                peer_seed=b"bench",
                inner_step=inner_step,
                num_sequences=spec.inner.batch_sequences,
                context_tokens=spec.model.context_tokens,
            )
        ).long()
        for inner_step in range(NUM_BATCHES)
    ]


def make_step(
    name: str, shape: str, num_threads: int, compiled_dir: Path
) -> Callable[[], tuple[float, int]]:
    """Return what takes a step of a side: its loss before, and its tokens.

    Args:
        name: of the side.
        shape: of the model.
        num_threads: of torch.
        compiled_dir: where what is compiled goes; empty, so that the time to compile is whole.
    """
    import torch
    from plain_loop import PlainLoop

    from volunteer.training import diloco
    from volunteer.training.acceleration import make_loss_function, prepare_compiler
    from volunteer.training.devices import choose_device
    from volunteer.training.genesis import build_genesis
    from volunteer.training.micro_batches import MicroBatches

    torch.set_num_threads(num_threads)
    spec, device = spec_of(shape), choose_device("cpu")
    micro_batch_sequences = MicroBatches(spec, device).sequences
    weights_P = build_genesis(spec).weights_P
    batches = itertools.cycle(batches_of(spec))
    num_tokens = spec.inner.batch_sequences * spec.model.context_tokens
    is_compiled = name.endswith("-compiled")
    if is_compiled:
        prepare_compiler(compiled_dir)
    if name.startswith("plain"):
        loop = PlainLoop(spec.model, spec.inner, weights_P, is_compiled=is_compiled)
        return lambda: (loop.step(next(batches), micro_batch_sequences), num_tokens)
    state = diloco.fresh_state(weights_P, spec, device)
    loss_function = make_loss_function(is_compiled=is_compiled, is_checkpointed=False)

    def ours() -> tuple[float, int]:
        result = diloco.train(
            state,
            next(batches),
            spec,
            micro_batch_sequences=micro_batch_sequences,
            device=device,
            should_stop=lambda: False,
            loss_function=loss_function,
        )
        assert result is not None
        return result.loss, num_tokens

    return ours


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, or be a side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="+", default=["commons", "25m"])
    parser.add_argument("--turns", type=int, default=NUM_TURNS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="both, compiled too")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.side:
        run_side(options.side, options.shape[0], options.threads)
        return
    for shape in options.shape:
        compare(shape, options)


if __name__ == "__main__":
    main()
