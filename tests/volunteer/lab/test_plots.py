"""Curves as PNG files: drawn where there is something, refused with the command that helps."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path

import pytest

from volunteer.lab.training.experiments import overlap
from volunteer.lab.training.plots import PlotsMissingError, _frame, _spread, plot_experiment
from volunteer.lab.training.plots import _Curve as Curve
from volunteer.lab.training.results import Point

PNG = b"\x89PNG\r\n\x1a\n"
EXPERIMENT = overlap.make(40)


def points(losses: list[float], *, arm: str, seed: int = 1, sends: bool = True) -> list[Point]:
    return [
        Point(
            experiment=EXPERIMENT.name,
            arm=arm,
            seed=seed,
            inner_step=i,
            tokens=1000 * i,
            loss=loss,
            bytes_per_worker=4e6 * i if sends else 0.0,
            notes="",
            is_last=i == len(losses) - 1,
            settings="s",
        )
        for i, loss in enumerate(losses)
    ]


@pytest.mark.slow
def test_draws_finished_arms_the_diverging_and_the_broken_down_among_them(tmp_path: Path) -> None:
    names = [arm.name for arm in EXPERIMENT.arms]
    drawn = [
        *points([5.0, 3.0, 2.5, 2.4], arm=names[0]),
        *points([5.0, 3.1, 2.4, 2.3], arm=names[0], seed=2),
        *points([5.0, 4.0, 6.0, 9.0], arm=names[1]),
        *points([5.0, math.inf], arm=names[2]),
        *points([5.0, 3.5, 2.9, 2.8], arm=names[3], sends=False),
    ]
    file = tmp_path / "curves.png"
    assert plot_experiment(file, EXPERIMENT, drawn)
    content = file.read_bytes()
    assert content.startswith(PNG)
    assert 10_000 < len(content) < 150_000
    assert plot_experiment(file, EXPERIMENT, drawn)
    assert file.read_bytes() == content


def test_what_is_not_finished_is_not_drawn(tmp_path: Path) -> None:
    unfinished = points([5.0, 3.0], arm=EXPERIMENT.arms[0].name)[:1]
    assert not plot_experiment(tmp_path / "curves.png", EXPERIMENT, unfinished)
    assert not (tmp_path / "curves.png").exists()


def test_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlotsMissingError) as caught:
        plot_experiment(tmp_path / "curves.png", EXPERIMENT, [])
    assert "pipx inject allmende matplotlib" in caught.value.hint


def test_labels_keep_apart_in_the_order_of_their_lines() -> None:
    placed = _spread([2.0, 2.01, 2.02, 5.0], 0.1, 1.0, 5.0)
    assert placed == sorted(placed)
    assert all(b - a >= 0.1 - 1e-9 for a, b in itertools.pairwise(placed))
    crowded = _spread([5.0, 5.0, 5.0], 0.1, 1.0, 5.0)
    assert max(crowded) <= 5.0 + 1e-9


def test_a_diverging_arm_does_not_squeeze_the_others() -> None:
    def curve(*losses: float) -> Curve:
        xs = tuple(float(i) for i in range(len(losses)))
        return Curve("arm", xs, xs, losses, losses, losses)

    good, diverging = curve(5.0, 3.0, 2.5, 2.4), curve(5.0, 4.0, 50.0, math.inf)
    bottom, top = _frame([good, diverging, good])
    assert bottom < 2.4
    assert top < 5.0
