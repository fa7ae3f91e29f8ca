"""Whole swarms of real machines in virtual time: I1 to I7 hold after every event, and work goes on.

Each seed is a test of its own, so a failing one is rerun alone by its name. `full` is the long
battery, for `packaging/test.sh --full`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from volunteer.lab.simulation.report import Report
from volunteer.lab.simulation.scenario import ROUND_S, Scenario
from volunteer.lab.simulation.simulation import Simulation
from volunteer.lab.simulation.world import CLEAN, HOSTILE, USUAL

pytestmark = [pytest.mark.simulation, pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class Battery:
    """A scenario, how many seeds it gets, and how far it must come."""

    scenario: Scenario
    num_seeds: int
    least_progress: float
    most_disagreed_rounds: float = 12.0
    """ROUNDS.md saw at most 8.2 without double signing, and 11.8 with it. Nearly all of that is
    time in which some cannot hear the others (LOGBOOK.md), for which no rule can be blamed."""
    most_whole_rounds: float = 8.0
    """The same while all that are up could hear each other all the time (I6); 3.8 at most in 876
    runs, but for the one that `outsiders.py` tells of."""

    @property
    def least_listed(self) -> float:
        """Of all tokens trained; some are in flight at the end, and switches drop some.

        In a hostile net a member is cut off for five rounds and more at a time, goes on alone, and
        keeps the last three contributions of that (rule 29): 0.76 in `hostile-3`, seed 1097.
        """
        return 0.75 if self.scenario.net is HOSTILE else 0.85


BATTERIES = {
    "clean-1": Battery(Scenario(num_members=1, net=CLEAN), 2, 0.95),
    "clean-2": Battery(Scenario(num_members=2, net=CLEAN), 3, 0.9),
    "clean-3": Battery(Scenario(num_members=3, net=CLEAN), 4, 0.9),
    "clean-4": Battery(Scenario(num_members=4, net=CLEAN), 6, 0.9),
    "clean-8": Battery(Scenario(num_members=8, net=CLEAN, num_rounds=12), 2, 0.9),
    "usual-3": Battery(Scenario(num_members=3), 6, 0.85),
    "usual-4": Battery(Scenario(num_members=4), 6, 0.85),
    "hostile-2": Battery(Scenario(num_members=2, net=HOSTILE), 6, 0.7),
    "hostile-3": Battery(Scenario(num_members=3, net=HOSTILE), 20, 0.75),
    "hostile-4": Battery(Scenario(num_members=4, net=HOSTILE), 20, 0.7),
    "hostile-8": Battery(Scenario(num_members=8, net=HOSTILE, num_rounds=12), 2, 0.65),
    "crashes-3": Battery(Scenario(num_members=3, crash_rate=0.2), 6, 0.75),
    "crashes-4": Battery(Scenario(num_members=4, crash_rate=0.2), 8, 0.75),
    "sleeps-4": Battery(Scenario(num_members=4, sleep_rate=0.06), 6, 0.65),
    "partitions-3": Battery(Scenario(num_members=3, partition_rate=0.3), 6, 0.75),
    "partitions-4": Battery(Scenario(num_members=4, partition_rate=0.3), 8, 0.75),
    "pauses-3": Battery(Scenario(num_members=3, pause_rate=0.15), 6, 0.7),
    "pauses-4": Battery(Scenario(num_members=4, pause_rate=0.15), 8, 0.75),
    "newcomers-5": Battery(Scenario(num_members=5, num_newcomers=3), 6, 0.85),
    "no-gossip-4": Battery(
        Scenario(num_members=4, net=replace(USUAL, has_gossip=False, sync_s=3.0)), 6, 0.85
    ),
    "everything-4": Battery(
        Scenario(
            num_members=4,
            net=HOSTILE,
            crash_rate=0.15,
            pause_rate=0.1,
            partition_rate=0.15,
            num_newcomers=1,
        ),
        8,
        0.55,
        # Links are cut at random all the time, and the net parts, half of 24 rounds long.
        most_disagreed_rounds=12.5,
    ),
    "liar-of-4": Battery(Scenario(num_members=4, num_liars=1, quorum=(2, 3), net=HOSTILE), 12, 0.7),
    "liar-of-3": Battery(Scenario(num_members=3, num_liars=1), 6, 0.8),
}


def seeds() -> Iterator[object]:
    """Every seed of every battery; odd ones have a publisher, even ones are open runs."""
    for name, battery in BATTERIES.items():
        for seed in range(battery.num_seeds):
            yield pytest.param(name, seed, id=f"{name}-seed{seed}")


def run_seed(name: str, seed: int) -> Report:
    """Run one seed; what fails says how to run it alone."""
    scenario = replace(BATTERIES[name].scenario, is_open=seed % 2 == 0)
    try:
        report = Simulation(scenario, seed).run()
        check_report(report, BATTERIES[name], is_open=scenario.is_open)
    except AssertionError as error:
        error.add_note(
            f"alone: python -m pytest -m simulation '{__name__.replace('.', '/')}.py::"
            f"test_a_swarm_keeps_the_rules_and_goes_on[{name}-seed{seed}]'"
        )
        raise
    return report


def check_report(report: Report, battery: Battery, *, is_open: bool) -> None:
    """One head, no stall, nothing but stale work given up."""
    assert len(report.heads) == 1, f"not on one chain 8 rounds after healing: {report.heads}"
    assert report.progress >= battery.least_progress
    assert report.listed_fraction >= battery.least_listed
    assert report.disagreed_s <= battery.most_disagreed_rounds * ROUND_S
    assert report.disagreed_whole_s <= battery.most_whole_rounds * ROUND_S
    if not is_open:
        # An open run may be founded twice by members that do not hear each other.
        assert report.num_reset_conflicts == 0


@pytest.mark.parametrize(("name", "seed"), seeds())
def test_a_swarm_keeps_the_rules_and_goes_on(name: str, seed: int) -> None:
    run_seed(name, seed)


def test_a_long_partition_goes_on_in_both_halves_and_heals_through_a_reset() -> None:
    scenario = Scenario(num_members=4, num_rounds=26, split_rounds=18, is_open=False)
    report = Simulation(scenario, 5).run()
    assert len(report.heads) == 1
    assert report.progress >= 0.85
    assert report.num_reset_conflicts > 0, "both halves were to go final on their own"
    assert report.num_dropped > 0, "one half's old work is given up, with that reason"


def test_nothing_is_given_up_while_nobody_switches() -> None:
    report = Simulation(Scenario(num_members=4, net=CLEAN, is_open=False), 11).run()
    assert report.num_dropped == 0
    assert report.forks_per_100 == 0
    assert report.most_final_lag == 2


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", BATTERIES)
def test_a_swarm_keeps_the_rules_on_many_more_seeds(name: str) -> None:
    for seed in range(1000, 1100):
        run_seed(name, seed)
