"""Members who lie about work, and scorers who lie about others: who is excluded, and who never is.

One member in six contributes what every aggregation marks, or what only scorers can tell, or
blames honest work as a scorer and covers for the others; each does two of these. The referee
holds at every step that no honest member is excluded on a chain that an honest one stands on, and
that who is excluded has neither a turn nor a place in a new roster.
"""

from __future__ import annotations

from unittest import mock

import pytest

from volunteer.lab.simulation.byzantine import WORK_LIES
from volunteer.lab.simulation.faults import ENVIRONMENT, make_scenario, parse_faults
from volunteer.lab.simulation.scenario import Scenario
from volunteer.lab.simulation.summary import SeedResult, run_seeds
from volunteer.rounds import scoring

pytestmark = [pytest.mark.simulation, pytest.mark.slow]
NUM_SEEDS = 10
"""About 2.5 s of a core each."""
LEAST_PROGRESS = 0.7
LEAST_LISTED = 0.75
"""Of the honest members' work."""
NET = ("loss", "duplication", "reordering", "delay")
EVERYWHERE = make_scenario(30, 30, (*ENVIRONMENT, *WORK_LIES))


def run(scenario: Scenario, seed: int) -> SeedResult:
    """Run one seed to its end."""
    (result,) = run_seeds(scenario, [seed])
    return result


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_bad_work_ends_in_exclusion_and_stops_nobody(seed: int) -> None:
    result = run(EVERYWHERE, seed)
    assert result.is_right, result.broken
    assert result.progress >= LEAST_PROGRESS
    assert result.listed_fraction >= LEAST_LISTED
    assert 1 <= result.num_excluded <= EVERYWHERE.num_liars


@pytest.mark.parametrize("lie", ["bad-work", "harmful-work"])
def test_whoever_does_nothing_else_is_excluded(lie: str) -> None:
    result = run(make_scenario(12, 24, (*NET, lie)), 1)
    assert result.is_right, result.broken
    # Scorers measure four of twelve; two strikes in three commits are sure for marks alone.
    assert result.num_excluded >= (2 if lie == "bad-work" else 1)
    assert result.num_struck == 0


def blamed_by_liars() -> list[SeedResult]:
    """Run members of whom one in six tells false verdicts and marks, and does nothing else."""
    scenario = make_scenario(20, 16, (*NET, "false-verdicts"))
    return list(run_seeds(scenario, range(4)))


def test_false_verdicts_and_false_marks_exclude_nobody() -> None:
    for result in blamed_by_liars():
        assert result.is_right, result.broken
        assert (result.num_excluded, result.num_struck) == (0, 0)


def test_if_one_scorer_were_enough_liars_would_have_honest_members_excluded() -> None:
    with (
        mock.patch.object(scoring, "MIN_AGREEING", 1),
        mock.patch.object(scoring, "AGREEING_PART", (0, 1)),
    ):
        results = blamed_by_liars()
    assert any("honest members are excluded" in result.broken for result in results)


def test_lies_about_work_are_asked_for_by_name() -> None:
    assert parse_faults("bad-work, loss") == {"bad-work", "loss"}
    assert parse_faults("all").isdisjoint(WORK_LIES)
