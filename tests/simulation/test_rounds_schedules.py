"""I2 under any order of events: no two conflicting commits are ever final, short of a reset."""

from __future__ import annotations

import pytest

from tests.simulation.schedules import Schedule

pytestmark = [pytest.mark.simulation, pytest.mark.slow]
SEEDS_PER_TEST = 30


@pytest.mark.parametrize("num_members", [3, 4, 5])
@pytest.mark.parametrize("first_seed", range(0, 3 * SEEDS_PER_TEST, SEEDS_PER_TEST))
def test_finals_never_conflict(num_members: int, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        schedule = Schedule(num_members, seed)
        schedule.settle(5)
        schedule.run(num_phases=8, steps_per_phase=10 * num_members)
        finals = [facts.final_height for facts in schedule.facts.values()]
        assert max(finals) > 2, f"seed {seed}: nothing became final"


def test_rosters_that_shrink_fast_never_lead_to_conflicting_finals() -> None:
    for seed in range(20):
        schedule = Schedule(4, seed, expiry_rounds=3)
        schedule.settle(4)
        schedule.run(num_phases=8, steps_per_phase=40)
