"""The file of points: rows come back, torn ones are dropped, and what was claimed is judged."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.volunteer.lab.tiny import tiny_task
from volunteer.lab.training.experiment import at_most, below
from volunteer.lab.training.results import (
    POINTS_NAME,
    Outcomes,
    Point,
    PointsFile,
    ResultsError,
    fingerprint,
)
from volunteer.lab.training.strategies.diloco import DiLoCoPlan
from volunteer.run import OuterSpec


def make_point(arm: str, seed: int, loss: float, *, is_last: bool = True, step: int = 4) -> Point:
    return Point(
        experiment="tiny",
        arm=arm,
        seed=seed,
        inner_step=step,
        tokens=64 * step,
        loss=loss,
        bytes_per_worker=1.5,
        notes="refused worker-1; excluded worker-1 3",
        is_last=is_last,
        settings="abc",
    )


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    file = PointsFile(tmp_path)
    file.drop_unfinished()
    written = [
        make_point('a, "b"', 0, 1 / 3, is_last=False),
        make_point('a, "b"', 0, float("inf")),
    ]
    for point in written:
        file.append(point)
    assert PointsFile(tmp_path).points == written
    assert PointsFile(tmp_path).finished == {('a, "b"', 0): "abc"}


def test_an_unfinished_arm_and_a_torn_line_are_dropped(tmp_path: Path) -> None:
    file = PointsFile(tmp_path)
    file.drop_unfinished()
    file.append(make_point("a", 0, 2.0))
    whole = (tmp_path / POINTS_NAME).read_bytes()
    file.append(make_point("b", 0, 3.0, is_last=False))
    with (tmp_path / POINTS_NAME).open("ab") as stream:
        stream.write(b"tiny,b,0,8,51")
    again = PointsFile(tmp_path)
    assert again.drop_unfinished() == (("b", 0),)
    assert (tmp_path / POINTS_NAME).read_bytes() == whole


@pytest.mark.parametrize("text", ["step,loss\n1,2\n", "{header}tiny,a,x,4,1,2.0,1.0,,1,abc\n"])
def test_another_file_of_that_name_is_refused(tmp_path: Path, text: str) -> None:
    file = PointsFile(tmp_path)
    file.drop_unfinished()
    header = (tmp_path / POINTS_NAME).read_text()
    (tmp_path / POINTS_NAME).write_text(text.format(header=header))
    with pytest.raises(ResultsError):
        PointsFile(tmp_path)


def test_a_fingerprint_knows_every_setting_but_no_default() -> None:
    plan = DiLoCoPlan(num_workers=2, steps_a_round=2)
    task = tiny_task()
    assert fingerprint(task, plan) == fingerprint(tiny_task(), dataclasses.replace(plan))
    others = [
        dataclasses.replace(plan, steps_a_round=3),
        dataclasses.replace(plan, outer=OuterSpec(lr=0.6)),
        dataclasses.replace(plan, attackers=((1, "noise"),)),
    ]
    assert len({fingerprint(task, one) for one in [plan, *others]}) == 4
    assert fingerprint(tiny_task(9), plan) != fingerprint(task, plan)
    assert fingerprint(task, dataclasses.replace(plan, drop_fraction=0.0)) == fingerprint(
        task, plan
    )


def test_verdicts_compare_each_seed_with_itself() -> None:
    losses = {"base": (1.0, 2.0, 4.0), "near": (1.01, 2.02, 4.0), "far": (1.1, 1.9, 4.4)}
    outcomes = Outcomes(
        make_point(arm, seed, loss)
        for arm, values in losses.items()
        for seed, loss in enumerate(values)
    )
    excess = outcomes.excess_percent("near", "base")
    assert excess is not None
    assert excess.values == pytest.approx((1.0, 1.0, 0.0))
    assert at_most(outcomes, "near", over="base", percent=0.7).is_met is True
    assert at_most(outcomes, "near", over="base", percent=0.6).is_met is False
    assert below(outcomes, "base", than="near").is_met is False  # equal for the last seed
    assert at_most(outcomes, "far", over="base", percent=9.0, min_seeds=4).is_met is None
    assert at_most(outcomes, "none", over="base", percent=9.0).seen == "not finished"
