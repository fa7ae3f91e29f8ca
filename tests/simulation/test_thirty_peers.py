"""Thirty members, thirty rounds, every fault at once: no seed breaks an invariant.

A failing seed is run alone by its name, or by `allmende lab simulate --peers 30 --rounds 30
--mesh 0 --seed N`. `full` is the long battery, for `packaging/test.sh --full`.
"""

from __future__ import annotations

import statistics

import pytest

from volunteer.lab.simulation.faults import FAULTS, make_scenario
from volunteer.lab.simulation.scenario import Scenario
from volunteer.lab.simulation.summary import SeedResult, run_seeds

pytestmark = [pytest.mark.simulation, pytest.mark.slow]
NUM_SEEDS = 100
"""Below 2.5 s of a core each, so that all of tests/simulation takes about 330 s of a core."""
NUM_FULL_SEEDS = 1000
SEEDS_PER_FULL_TEST = 50
HEALED_ROUNDS, MEDIAN_HEALED_ROUNDS = 8.0, 3.0
LEAST_PROGRESS = 0.6
"""With halves that hear nothing of each other, closed lids and clocks that jump. The least of 1,000
was 0.601 (seed 843, a publisher away for long) before who comes back looked first where the others
have gone; of 85 since, with the 24 worst of those 1,000 among them, it is 0.777."""
LIVE_PROGRESS = 0.85
"""Of the ideal, with a live quorum and delays of less than a quarter of the failover interval."""
EVERYTHING = make_scenario(30, 30, FAULTS)
LIVE = make_scenario(
    30,
    12,
    (
        *("loss", "duplication", "reordering", "delay", "crashes", "leaving", "capped-list"),
        *("double-commit", "double-vote", "wrong-hash", "withheld-blob", "censoring", "spam"),
    ),
)


def run(scenario: Scenario, seed: int) -> SeedResult:
    """Run one seed: all invariants held, and everyone has one head."""
    (result,) = run_seeds(scenario, [seed])
    assert not result.broken
    assert result.num_heads == 1
    assert result.healed_after_rounds <= HEALED_ROUNDS
    return result


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_no_fault_breaks_an_invariant(seed: int) -> None:
    result = run(EVERYTHING, seed)
    assert result.progress >= LEAST_PROGRESS
    assert result.num_finals > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(4))
def test_with_a_live_quorum_and_short_delays_work_goes_on_nearly_undisturbed(seed: int) -> None:
    assert LIVE.net.median_s < LIVE.failover_s / 4
    assert run(LIVE, seed).progress >= LIVE_PROGRESS


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(10_000, 10_000 + NUM_FULL_SEEDS, SEEDS_PER_FULL_TEST))
def test_no_fault_breaks_an_invariant_in_a_thousand_seeds(first: int) -> None:
    results = [run(EVERYTHING, seed) for seed in range(first, first + SEEDS_PER_FULL_TEST)]
    assert min(result.progress for result in results) >= LEAST_PROGRESS
    assert statistics.median(r.progress for r in results) >= LIVE_PROGRESS
    assert statistics.median(r.healed_after_rounds for r in results) <= MEDIAN_HEALED_ROUNDS


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_thousand_peers_go_on_under_loss_and_crashes() -> None:
    scenario = make_scenario(
        1000, 20, ("loss", "duplication", "reordering", "delay", "crashes"), mesh_degree=8
    )
    result = run(scenario, 0)
    assert result.progress >= LIVE_PROGRESS
    assert result.num_finals > 0
    assert result.bytes_per_peer_round["contribution"] > 0
