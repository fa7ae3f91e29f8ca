"""Experiments: whenever one is cut short, the same call ends with the same file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.volunteer.lab.tiny import arm_of, tiny_task
from volunteer.errors import AlreadyRunningError
from volunteer.files import lock_folder
from volunteer.lab.training.experiment import Experiment
from volunteer.lab.training.results import POINTS_NAME, LabError, PointsFile, ResultsError
from volunteer.lab.training.runner import Budget, BudgetSpent, run_experiment
from volunteer.lab.training.strategies.data_parallel import DataParallelPlan
from volunteer.lab.training.strategies.diloco import DiLoCoPlan

NO_LIMIT = float("inf")
pytestmark = pytest.mark.slow


class KilledError(BaseException):
    """As if the process ended here."""


def tiny_experiment(num_steps: int = 8) -> Experiment:
    task = tiny_task(num_steps)
    return Experiment(
        name="tiny",
        title="two ways to train",
        arms=(
            arm_of(DataParallelPlan(num_workers=1, steps_a_round=2), task, name="alone"),
            arm_of(DiLoCoPlan(num_workers=2, steps_a_round=2), task, name="together"),
        ),
        reference="alone",
        judge=lambda outcomes: (),
    )


def _ignore(text: str) -> None:
    pass


def run(folder: Path, *, say: Callable[[str], None] = _ignore, steps: int = 8) -> bytes:
    budget = Budget(NO_LIMIT)
    run_experiment(tiny_experiment(steps), seeds=(0, 1), folder=folder, budget=budget, say=say)
    return (folder / POINTS_NAME).read_bytes()


def test_a_kill_at_any_point_ends_with_the_same_file(tmp_path: Path) -> None:
    """Each call gets so far that some arm comes to its end, or is killed in the middle of one."""
    whole = run(tmp_path / "whole")
    assert len(whole.splitlines()) == 1 + 2 * 2 * 3
    folder = tmp_path / "killed"
    lives = (1, 2, 3, 4, 5, 2, 1)
    for num_points in lives:
        with pytest.raises(KilledError):
            run(folder, say=_kill_after(num_points))
    assert run(folder) == whole


def _kill_after(num_points: int) -> Callable[[str], None]:
    seen = 0

    def say(text: str) -> None:
        nonlocal seen
        seen += "step" in text
        if seen == num_points:
            raise KilledError

    return say


def test_a_torn_last_line_is_trained_again(tmp_path: Path) -> None:
    whole = run(tmp_path)
    (tmp_path / POINTS_NAME).write_bytes(whole[:-20])
    said: list[str] = []
    assert run(tmp_path, say=said.append) == whole
    assert said[0] == "together, seed 1: was cut short and begins anew"
    assert len(said) == 1 + 3


def test_what_is_finished_is_not_trained_again(tmp_path: Path) -> None:
    run(tmp_path)
    said: list[str] = []
    run(tmp_path, say=said.append)
    assert said == []


def test_the_budget_ends_it_and_the_same_call_goes_on(tmp_path: Path) -> None:
    clock = iter(range(1000))
    budget = Budget(6.0, now_s=lambda: float(next(clock)))
    with pytest.raises(BudgetSpent):
        run_experiment(tiny_experiment(), seeds=(0, 1), folder=tmp_path, budget=budget, say=_ignore)
    assert 0 < len(PointsFile(tmp_path).points) < 12
    assert run(tmp_path) == run(tmp_path / "whole")


def test_no_budget_is_no_training(tmp_path: Path) -> None:
    with pytest.raises(BudgetSpent):
        run_experiment(
            tiny_experiment(), seeds=(0,), folder=tmp_path, budget=Budget(0.0), say=print
        )
    assert PointsFile(tmp_path).points == []


def test_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    run(tmp_path)
    with pytest.raises(ResultsError, match="other settings"):
        run(tmp_path, steps=6)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(AlreadyRunningError):
        run(tmp_path)


def test_arms_can_be_chosen(tmp_path: Path) -> None:
    budget = Budget(NO_LIMIT)
    only = frozenset({"together"})
    run_experiment(
        tiny_experiment(), seeds=(0,), folder=tmp_path, budget=budget, say=_ignore, only=only
    )
    assert {point.arm for point in PointsFile(tmp_path).points} == {"together"}
    with pytest.raises(LabError, match="no arm of tiny: 'other'; it has '"):
        run_experiment(
            tiny_experiment(),
            seeds=(0,),
            folder=tmp_path,
            budget=budget,
            say=_ignore,
            only=frozenset({"other"}),
        )
