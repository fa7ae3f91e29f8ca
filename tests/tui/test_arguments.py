"""The flags' bounds are those of what the flags are for."""

from __future__ import annotations

import math

import pytest
import typer

from tui import arguments
from volunteer.agent import demo
from volunteer.agent.joined_run import choose_run
from volunteer.errors import RunSpecError
from volunteer.messages import MAX_TEMPERATURE


def test_a_round_may_last_as_long_as_a_run_allows() -> None:
    for good in (arguments.MIN_ROUND_S, arguments.MAX_ROUND_S):
        assert choose_run(None, good).rounds.round_s == arguments.round_length(good)
    for bad in (arguments.MIN_ROUND_S - 0.5, arguments.MAX_ROUND_S + 1.0):
        with pytest.raises(RunSpecError):
            choose_run(None, bad)
        with pytest.raises(typer.BadParameter):
            arguments.round_length(bad)
    assert arguments.round_length(None) is None


def test_a_demo_may_last_as_long_as_the_demo_allows() -> None:
    assert (arguments.MIN_DEMO_MINUTES, arguments.MAX_DEMO_MINUTES) == (
        demo.MIN_MINUTES,
        demo.MAX_MINUTES,
    )
    assert arguments.minutes(1.0) == 1.0
    for bad in (0.5, math.nan, 1441.0):
        with pytest.raises(typer.BadParameter, match="too few rounds"):
            arguments.minutes(bad)


def test_a_temperature() -> None:
    assert arguments.temperature(MAX_TEMPERATURE) == MAX_TEMPERATURE
    for bad in (-0.1, math.nan, MAX_TEMPERATURE + 1):
        with pytest.raises(typer.BadParameter):
            arguments.temperature(bad)


def test_a_duration() -> None:
    assert arguments.duration("2h") == arguments.duration(7200.0) == 7200.0
    with pytest.raises(typer.BadParameter, match="write a number and s, m, h or d"):
        arguments.duration("2x")
