"""The table of ROUNDS.md, made anew: a few seeds of each row, and 200 of each with `full`."""

from __future__ import annotations

import pytest

from tests.simulation.table import ROWS, line_of, run_one, table

pytestmark = [pytest.mark.simulation, pytest.mark.slow]


def test_the_table_has_a_line_of_each_kind_for_each_row() -> None:
    name = next(iter(ROWS))
    lines = list(table([run_one(name, 5000)]))
    assert len(lines) == 4
    assert len({line.count("|") for line in lines if not line.startswith("|---")}) == 1


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_the_table(name: str) -> None:
    runs = [run_one(name, seed) for seed in range(6000, 6200)]
    has_majority_of_liars = "1/2" in name  # one of three, once one honest member is away
    broken = [run.broken for run in runs if run.broken]
    assert has_majority_of_liars or not broken, line_of(name, runs)
    assert not [run.seed for run in runs if run.num_heads > 1], line_of(name, runs)
