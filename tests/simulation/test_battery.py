"""The battery goes on where it was stopped, and says what it saw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation import battery
from tests.simulation.battery import COLUMNS, done_in, main, run
from volunteer.lab.simulation.faults import make_scenario
from volunteer.lab.simulation.scenario import Scenario
from volunteer.lab.simulation.summary import SeedResult

pytestmark = pytest.mark.simulation


def test_seeds_that_are_there_are_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "seeds.csv"
    scenario = make_scenario(3, 2, ("loss",))
    assert [result.seed for result in run(scenario, range(2), file)] == [0, 1]
    assert [result.seed for result in run(scenario, range(3), file)] == [2]
    header, *rows = file.read_text(encoding="utf-8").splitlines()
    assert header == ",".join(COLUMNS)
    assert [row.split(",")[0] for row in rows] == ["0", "1", "2"]
    assert done_in(file) == {0, 1, 2}


def test_a_file_with_fewer_columns_goes_on_with_those(tmp_path: Path) -> None:
    file = tmp_path / "seeds.csv"
    file.write_text("seed,heads,broken\n0,1,\n", encoding="utf-8")
    assert [result.seed for result in run(make_scenario(3, 2, ("loss",)), range(2), file)] == [1]
    assert file.read_text(encoding="utf-8").splitlines()[1:] == ["0,1,", "1,1,"]


def test_the_exit_status_tells_whether_all_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--seeds", "1", "--peers", "3", "--rounds", "2", "--faults", "none"]
    assert main([str(tmp_path / "right.csv"), *argv]) == 0

    def break_rules(scenario: Scenario, seeds: Iterable[int]) -> list[SeedResult]:
        broken = SeedResult(seed=0, broken="in round 1.0: I4", num_heads=1, bytes_per_peer_round={})
        return [replace(broken, seed=seed) for seed in seeds]

    monkeypatch.setattr(battery, "run_seeds", break_rules)
    broken_file = tmp_path / "broken.csv"
    assert main([str(broken_file), *argv]) == 1
    assert broken_file.read_text(encoding="utf-8").splitlines()[-1].endswith("in round 1.0: I4")
