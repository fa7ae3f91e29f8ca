"""One sampler at a time, for a minute at most, and none left over."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import trio
from trio.testing import MockClock

from tests.fakes import child_programs as programs
from tests.fakes.virtual_time import in_nursery, run_virtual, settle, until
from volunteer.agent import verbs as verbs_module
from volunteer.agent.sampling import SAMPLE_DEADLINE_S, Sampler
from volunteer.agent.status import StatusSource
from volunteer.answers import Sample
from volunteer.errors import ControlError
from volunteer.messages import MAX_PROMPT_CHARS, Generate, Generated

SAMPLER = """
command = next(commands())
say(type="generated", text=command["prompt"] + "!" * command["max_tokens"],
    num_tokens=command["max_tokens"])
"""
REFUSES = """
next(commands())
say(type="failed", message="the weights are damaged", hint="wait")
sys.exit(1)
"""
SAYS_IT_TWICE = """
for _ in range(2):
    say(type="generated", text="x", num_tokens=1)
"""
NEVER_ANSWERS = """
next(commands())
sys.stderr.write("up\\n"); sys.stderr.flush()
time.sleep(1000)
"""


def make_sampler(tmp_path: Path, script: str) -> Sampler:
    sampler = Sampler(tmp_path, "dense", tmp_path / "sampler.log")
    sampler._argv = programs.python(script)
    return sampler


def children() -> list[psutil.Process]:
    return psutil.Process().children()


async def wait_up(tmp_path: Path) -> None:
    log_file = tmp_path / "sampler.log"
    await until(lambda: log_file.exists() and log_file.read_text() == "up\n")


def test_the_request_goes_in_and_the_text_comes_out(tmp_path: Path) -> None:
    async def main(clock: MockClock) -> Generated:
        sampler = make_sampler(tmp_path, SAMPLER)
        await sampler.sample("s" * 64, Generate(prompt="a", max_tokens=1))
        return await sampler.sample("s" * 64, Generate(prompt="b\n", max_tokens=3))

    assert run_virtual(main) == Generated(text="b\n!!!", num_tokens=3)
    assert not children()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (REFUSES, "the weights are damaged"),
        (programs.CRASHES_AT_ONCE, "exit status 3"),
        (SAYS_IT_TWICE, "exit status 0"),
        (programs.GARBAGE.replace("sys.stdin.read()", ""), "exit status 0"),
        (programs.FLOOD, "exit status -9"),
    ],
)
def test_a_sampler_that_fails_is_a_refusal(tmp_path: Path, script: str, words: str) -> None:
    async def main(clock: MockClock) -> None:
        with pytest.raises(ControlError, match=words):
            await make_sampler(tmp_path, script).sample("s", Generate())

    run_virtual(main)
    assert not children()


def test_a_program_that_cannot_be_started_is_a_refusal(tmp_path: Path) -> None:
    async def main(clock: MockClock) -> None:
        sampler = make_sampler(tmp_path, SAMPLER)
        sampler._argv = [str(tmp_path / "none")]
        with pytest.raises(ControlError, match="cannot be started"):
            await sampler.sample("s", Generate())
        sampler._argv = programs.python(SAMPLER)
        assert (await sampler.sample("s", Generate(max_tokens=1))).text == "!"

    run_virtual(main)


def test_one_at_a_time_and_none_after_its_deadline(tmp_path: Path) -> None:
    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        sampler = make_sampler(tmp_path, NEVER_ANSWERS)
        refusals: list[str] = []

        async def ask() -> None:
            with pytest.raises(ControlError) as caught:
                await sampler.sample("s", Generate())
            refusals.append(str(caught.value))

        nursery.start_soon(ask)
        await wait_up(tmp_path)
        await ask()
        assert "already" in refusals[0]
        assert len(children()) == 1
        clock.jump(SAMPLE_DEADLINE_S - 0.1)
        await settle()
        assert len(refusals) == 1
        clock.jump(0.2)
        await until(lambda: len(refusals) == 2)
        assert "no text within 60 s" in refusals[1]
        assert not children()
        sampler._argv = programs.python(SAMPLER)
        assert (await sampler.sample("s", Generate(max_tokens=1))).text == "!"

    run_virtual(in_nursery(body))


def test_it_ends_with_the_agent(tmp_path: Path) -> None:
    async def body(nursery: trio.Nursery, clock: MockClock) -> None:
        sampler = make_sampler(tmp_path, NEVER_ANSWERS)
        async with trio.open_nursery() as inner:
            inner.start_soon(sampler.sample, "s", Generate())
            await wait_up(tmp_path)
            inner.cancel_scope.cancel()
        assert not children()

    run_virtual(in_nursery(body))


# ------------------------------------------------------------------------------- the verb


class Recorder:
    """A sampler that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Generate]] = []

    async def sample(self, state_hash: str, request: Generate) -> Generated:
        await trio.lowlevel.checkpoint()
        self.asked.append((state_hash, request))
        return Generated(text="written", num_tokens=7)


def ask_verb(args: dict[str, Any], tip: str | None = "c3") -> tuple[Sample, Recorder]:
    """Ask the verb of an agent that stands on `tip`, of height 3."""
    recorder = Recorder()
    machine = SimpleNamespace(
        tip=tip, known=SimpleNamespace(facts={"c3": SimpleNamespace(height=3)})
    )
    driver = SimpleNamespace(machine=machine, state_hash="a1" * 32)
    source = cast(StatusSource, SimpleNamespace(driver=driver))
    verb = verbs_module._make_sample(source, cast(Sampler, recorder))
    result = trio.run(verb, args)
    assert isinstance(result, Sample)
    return result, recorder


def test_the_verb_says_whose_text_it_is() -> None:
    args = {"prompt": "p", "max_tokens": 7, "temperature": 0, "seed": 9}
    result, recorder = ask_verb(args)
    assert result == Sample(
        text="written", num_tokens=7, state_hash="a1" * 32, round_index=3, seed=9
    )
    due = Generate(prompt="p", max_tokens=7, temperature=0.0, seed=9)
    assert recorder.asked == [("a1" * 32, due)]


def test_without_a_seed_each_request_has_its_own_and_tells_it() -> None:
    seeds = []
    for _ in range(4):
        result, recorder = ask_verb({})
        assert recorder.asked[0][1].seed == result.seed
        seeds.append(result.seed)
    assert len(set(seeds)) > 1


def test_before_there_are_weights_it_is_refused() -> None:
    with pytest.raises(ControlError, match="no shared weights yet") as caught:
        ask_verb({}, tip=None)
    assert (caught.value.exit_code, "allmende status" in caught.value.hint) == (1, True)


@pytest.mark.parametrize(
    "args",
    [
        {"prompt": 7},
        {"prompt": "x" * (MAX_PROMPT_CHARS + 1)},
        {"max_tokens": 0},
        {"max_tokens": 10_001},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": 10.1},
        {"temperature": None},
        {"seed": -1},
        {"seed": 2**32},
        {"seed": None},
    ],
)
def test_bad_arguments_are_bad_usage(args: dict[str, Any]) -> None:
    with pytest.raises(ControlError) as caught:
        ask_verb(args)
    assert caught.value.exit_code == 2
