"""Text from shared weights: the model's own predictions, and a process that survives anything."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from p2p.blobstore import BlobStore
from p2p.errors import BlobCorruptError, BlobUnavailableError
from tests.volunteer.training.tiny_run import tiny_spec, tiny_weights_P
from volunteer.errors import CheckpointCorruptError, TrainerError
from volunteer.messages import (
    Generate,
    Generated,
    SamplerEvent,
    SamplerFailed,
    encode_line,
    sampler_event_decoder,
)
from volunteer.run import format_run_spec
from volunteer.training.genesis import build_genesis
from volunteer.training.model import forward, weights_of
from volunteer.training.sample import START, Reader, answer, choose_token, generate
from volunteer.training.state import SharedState, write_state

SPEC = tiny_spec()
CONTEXT = SPEC.model.context_tokens
REPOSITORY = Path(__file__).parents[3]
WEIGHTS = weights_of(tiny_weights_P(SPEC, torch.float64) * 8, SPEC.model)
"""Far from uniform, in fp64 so that only rounding separates two ways to the same numbers."""
_never = threading.Event()


@pytest.mark.parametrize("num_prompt", [1, 3, CONTEXT - 1, CONTEXT])
def test_every_prediction_is_the_models_from_the_context_it_sees(num_prompt: int) -> None:
    tokens = [(7 * i + i * i) % 256 for i in range(num_prompt)]
    reader = Reader(WEIGHTS, SPEC.model)
    with torch.no_grad():
        logits_V = reader.read(tokens)
        seen = list(tokens)
        for _ in range(3 * CONTEXT):
            due_V = forward(WEIGHTS, torch.tensor([seen]), SPEC.model)[0, -1]
            assert torch.allclose(logits_V, due_V, rtol=0, atol=1e-11)
            token = int(logits_V.argmax()) ^ len(tokens) % 3
            seen.append(token)
            if len(seen) > CONTEXT:
                seen = seen[-CONTEXT // 2 :]
            logits_V = reader.read([token])


def test_without_temperature_the_likeliest_byte_is_taken_each_time() -> None:
    written = generate(WEIGHTS, SPEC.model, b"ab", num_tokens=6, temperature=0.0, seed=1)
    tokens = list(b"ab")
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(forward(WEIGHTS, torch.tensor([tokens]), SPEC.model)[0, -1].argmax()))
    assert list(written) == tokens[2:]


def test_a_seed_gives_the_same_text_and_another_one_another() -> None:
    def text(seed: int) -> bytes:
        return generate(WEIGHTS, SPEC.model, b"x", num_tokens=40, temperature=1.0, seed=seed)

    assert text(5) == text(5)
    assert len({text(seed) for seed in range(5)}) == 5


def test_no_prompt_is_a_lines_end_and_a_long_one_counts_by_its_end() -> None:
    def text(prompt: bytes) -> bytes:
        return generate(WEIGHTS, SPEC.model, prompt, num_tokens=20, temperature=0.7, seed=3)

    assert text(b"") == text(START)
    end = bytes(range(60, 60 + CONTEXT))
    assert text(b"what came long before " * 9 + end) == text(end)
    assert text(b"?" + end[1:]) != text(end)


def test_tokens_are_drawn_as_often_as_the_temperature_says() -> None:
    logits_V = torch.tensor([0.0, 1.0, 3.0, -2.0])
    generator = torch.Generator().manual_seed(11)
    draws = Counter(choose_token(logits_V, 2.0, generator) for _ in range(4000))
    for token, share in enumerate((logits_V / 2.0).softmax(-1).tolist()):
        deviation = math.sqrt(share * (1 - share) / 4000)
        assert abs(draws[token] / 4000 - share) < 4 * deviation


@pytest.mark.parametrize("temperature", [5e-324, 1e-6, 10.0])
def test_no_temperature_breaks_the_draw(temperature: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.tensor([1e30, -1e30, 3e30])
    assert choose_token(logits_V, temperature, generator) == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_broken_weights_are_told(bad: float) -> None:
    with pytest.raises(TrainerError, match="broken"):
        choose_token(torch.tensor([0.0, bad]), 0.0, torch.Generator())


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    state_hash = write_state(build_genesis(SPEC), store)
    result = answer(SPEC, store, state_hash, Generate(max_tokens=300, temperature=10.0, seed=1))
    assert result.num_tokens == 300
    assert "\N{REPLACEMENT CHARACTER}" in result.text


def damaged(store: BlobStore) -> str:
    state_hash = write_state(build_genesis(SPEC), store)
    file = store.file_of(state_hash)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    return state_hash


def of_another_model(store: BlobStore) -> str:
    return write_state(SharedState(weights_P=torch.ones(5), momentum_P=torch.ones(5)), store)


UNUSABLE: list[tuple[Callable[[BlobStore], str], type[Exception], str]] = [
    (lambda store: "f" * 64, BlobUnavailableError, "not on this disk"),
    (lambda store: "../../spec.toml", BlobUnavailableError, "not on this disk"),
    (damaged, BlobCorruptError, "damaged"),
    (lambda store: store.add_bytes(b"no state" * 9), CheckpointCorruptError, "not a state of"),
    (of_another_model, CheckpointCorruptError, "not a state of this run"),
]


@pytest.mark.parametrize(("make", "kind", "words"), UNUSABLE)
def test_a_state_that_cannot_be_used_has_its_error(
    tmp_path: Path, make: Callable[[BlobStore], str], kind: type[Exception], words: str
) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(kind, match=words):
        answer(SPEC, store, make(store), Generate())


# ------------------------------------------------------------------------------ the process


class Place:
    """A run directory with a state, and processes that sample from it."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "spec.toml").write_text(format_run_spec(SPEC), "utf-8")
        self.store = BlobStore(run_dir / "modules" / "dense" / "blobs")
        self.state_hash = write_state(build_genesis(SPEC), self.store)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, state_hash: str | None = None) -> subprocess.Popen[bytes]:
        argv = ["--run-dir", str(self.run_dir), "--state-hash", state_hash or self.state_hash]
        process = subprocess.Popen(
            [sys.executable, "-m", "volunteer.training.sample", *argv],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def ask(self, line: bytes, state_hash: str | None = None) -> tuple[SamplerEvent, int, bytes]:
        """Give one line, keep stdin open as the agent does; return event, status and log."""
        process = self.start(state_hash)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(line)
        process.stdin.flush()
        event = sampler_event_decoder.decode(process.stdout.readline())
        assert process.stdout.read() == b""
        return event, process.wait(60), process.stderr.read()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    for process in place.processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(120)
def test_the_process_writes_what_the_function_does(place: Place) -> None:
    request = Generate(prompt="Ünder ", max_tokens=30, temperature=0.9, seed=4)
    event, status, log = place.ask(encode_line(request))
    assert (status, log) == (0, b"")
    assert event == answer(SPEC, place.store, place.state_hash, request)
    assert isinstance(event, Generated)
    assert event.num_tokens == 30


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_state_that_cannot_be_used_is_an_answer(place: Place) -> None:
    event, status, log = place.ask(encode_line(Generate()), "f" * 64)
    assert isinstance(event, SamplerFailed)
    assert "not on this disk" in event.message
    assert (status, log) == (1, b"")


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_line_that_is_no_command_is_an_answer(place: Place) -> None:
    line = msgspec.json.encode({"type": "generate", "max_tokens": 0}) + b"\n"
    event, status, _ = place.ask(line)
    assert isinstance(event, SamplerFailed)
    assert "max_tokens" in event.message
    assert status == 1


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.parametrize("line", [b"", encode_line(Generate(max_tokens=10_000))])
def test_it_ends_when_the_agent_has_gone(place: Place, line: bytes) -> None:
    process = place.start()
    output, _ = process.communicate(line, timeout=60)
    assert (process.returncode, output) == (1, b"")


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="priorities are POSIX")
def test_it_has_the_lowest_priority_and_the_prompt_is_on_no_command_line(place: Place) -> None:
    process = place.start()
    assert process.stdin is not None
    process.stdin.write(encode_line(Generate(prompt="a secret", max_tokens=10_000)))
    process.stdin.flush()
    child = psutil.Process(process.pid)
    while child.nice() != 19:  # it has not come so far yet; pytest's timeout bounds it
        _never.wait(0.01)
    assert "secret" not in " ".join(child.cmdline())
