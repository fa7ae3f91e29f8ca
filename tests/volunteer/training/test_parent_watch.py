"""A trainer whose agent was stopped saves and ends; one that is only looked into goes on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from tests.system.agents import is_alive, wait_until
from tests.volunteer.training.trainer_process import Run, Trainer
from volunteer.messages import AGENT_STOOD_STILL_STATUS, SnapshotSaved, Stepped, Stopping
from volunteer.training.parent_watch import (
    LOOK_EVERY_S,
    NUM_LOOKS,
    ParentWatch,
    Reading,
    parent_reader,
)

RUNS = Reading(is_stopped=False, num_switches=7)
STILL = Reading(is_stopped=True, num_switches=8)
PARENT = """
import subprocess, sys
child = subprocess.Popen(sys.argv[1:])
print(child.wait(), file=sys.stderr, flush=True)
"""
"""Starts a trainer with its own pipes and says how it ended."""


def looks(readings: Iterable[Reading | None]) -> tuple[ParentWatch, list[bool], int]:
    """Return a watch that has seen `readings`, what its looks returned, and the stops it asked."""
    stops: list[None] = []
    told = list(readings)
    source = iter(told)
    watch = ParentWatch(lambda: next(source), lambda: stops.append(None))
    return watch, [watch.look() for _ in told], len(stops)


def test_a_parent_that_stands_still_is_a_stop() -> None:
    watch, goes_on, num_stops = looks([RUNS, *[STILL] * NUM_LOOKS])
    assert goes_on == [True] * NUM_LOOKS + [False]
    assert (watch.stood_still, num_stops) == (True, 1)


@pytest.mark.parametrize(
    "readings",
    [
        [RUNS] * 9,
        [STILL, STILL, RUNS] * 3,  # woken with its family
        [Reading(is_stopped=True, num_switches=number) for number in range(9)],  # strace
        [STILL, STILL, None],  # it has ended: the end of our input tells
    ],
    ids=["runs", "woken", "traced", "gone"],
)
def test_a_parent_that_goes_on_is_none(readings: list[Reading | None]) -> None:
    watch, goes_on, num_stops = looks(readings)
    assert (watch.stood_still, num_stops) == (False, 0)
    assert goes_on == [reading is not None for reading in readings]


def test_the_parent_is_read_as_it_is() -> None:
    reading = parent_reader()()
    assert reading is not None
    assert not reading.is_stopped
    assert reading.num_switches > 0


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_trainer_ends_within_seconds_when_its_agent_is_stopped(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trainer = Trainer(tmp_path, launcher=(sys.executable, "-c", PARENT))
    try:
        trainer.send(run.rebase())
        trainer.wait_for(Stepped)
        (child,) = psutil.Process(trainer.process.pid).children()
        os.kill(trainer.process.pid, signal.SIGSTOP)
        stopping = trainer.wait_for(Stopping)
        assert trainer.wait_for(SnapshotSaved).inner_step == stopping.inner_step > 0
        # Nobody can fetch its exit status before its parent goes on.
        wait_until("it has ended", lambda: not is_alive(child.pid), 20)
        assert run.saved().inner_step == stopping.inner_step
        assert "the agent stands still" in trainer.log_file.read_text()
        os.kill(trainer.process.pid, signal.SIGCONT)
        trainer.wait_for_end()
        assert trainer.log_file.read_text().splitlines()[-1] == str(AGENT_STOOD_STILL_STATUS)
    finally:
        trainer.close()


def test_that_is_a_matter_of_seconds() -> None:
    assert LOOK_EVERY_S * NUM_LOOKS <= 3.0
