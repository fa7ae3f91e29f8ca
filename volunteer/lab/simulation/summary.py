"""Runs seeds of one scenario, and says how they went: for people, and as JSON.

Runs in: command line.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from volunteer.lab.simulation.errors import BrokenRule
from volunteer.lab.simulation.report import Report
from volunteer.lab.simulation.scenario import ROUND_S, Scenario
from volunteer.lab.simulation.simulation import Simulation

HEADER = "seed  height  progress  forks/100  final lag  disagreed  healed  heads  listed  bans"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """One seed, run to its end or to the first broken invariant."""

    seed: int
    broken: str
    """The invariant that does not hold, as a sentence; empty: all held."""
    height: int = 0
    """Of the tallest chain at the end."""
    progress: float = 0.0
    """Heights against those of a net in which nothing goes wrong."""
    forks_per_100: float = 0.0
    """Switches of branch by anyone, per 100 heights."""
    mean_final_lag: float = 0.0
    """Heights from the tip down to the last final commit, whenever one became final."""
    most_final_lag: int = 0
    num_finals: int = 0
    """How often a member came to hold a commit final."""
    disagreed_rounds: float = 0.0
    """The longest time for which members that were up were not on one chain."""
    healed_after_rounds: float = 0.0
    """From the end of all trouble until everyone had the same head."""
    num_heads: int = 0
    """At the end; 1 is right."""
    listed_fraction: float = 0.0
    """Tokens that the chain lists, of all that were trained and kept."""
    num_dropped: int = 0
    """Contributions given up, with a reason."""
    num_bans: int = 0
    num_excluded: int = 0
    """Members excluded for bad work."""
    num_struck: int = 0
    """Honest members that once had a strike."""
    bytes_per_peer_round: dict[str, float]
    """What one member sends in one round, by kind; blobs and states are counted instead."""
    blobs_per_peer_round: float = 0.0
    """Contributions that one member fetches in one round."""
    states_per_peer_round: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether every invariant held and all ended on one chain."""
        return not self.broken and self.num_heads == 1


def run_seeds(scenario: Scenario, seeds: Iterable[int]) -> Iterator[SeedResult]:
    """Run each seed and yield its result; odd seeds have a publisher, even ones are open runs."""
    for seed in seeds:
        simulation = Simulation(replace(scenario, is_open=seed % 2 == 0), seed)
        try:
            yield _result(seed, simulation.run())
        except BrokenRule as error:
            at_round = simulation.world.now_s / ROUND_S
            broken = f"in round {at_round:.1f}: {error}"
            yield SeedResult(seed=seed, broken=broken, bytes_per_peer_round={})


def _result(seed: int, report: Report) -> SeedResult:
    return SeedResult(
        seed=seed,
        broken="",
        height=report.height,
        progress=report.progress,
        forks_per_100=report.forks_per_100,
        mean_final_lag=report.mean_final_lag,
        most_final_lag=report.most_final_lag,
        num_finals=report.num_finals,
        disagreed_rounds=report.disagreed_s / ROUND_S,
        healed_after_rounds=report.healed_after_s / ROUND_S,
        num_heads=len(report.heads),
        listed_fraction=report.listed_fraction,
        num_dropped=report.num_dropped,
        num_bans=report.num_bans,
        num_excluded=report.num_excluded,
        num_struck=report.num_struck,
        bytes_per_peer_round=report.bytes_per_peer_round,
        blobs_per_peer_round=report.num_blobs / report.num_peer_rounds,
        states_per_peer_round=report.num_states / report.num_peer_rounds,
    )


def row(result: SeedResult) -> str:
    """Return one line of the table under `HEADER`."""
    if result.broken:
        return f"{result.seed:4d}  BROKEN {result.broken}"
    lag = f"{result.mean_final_lag:.1f} ({result.most_final_lag})" if result.num_finals else "none"
    return (
        f"{result.seed:4d}  {result.height:6d}  {result.progress:8.2f}  {result.forks_per_100:9.0f}"
        f"  {lag:>9}  {result.disagreed_rounds:9.1f}  {result.healed_after_rounds:6.1f}"
        f"  {result.num_heads:5d}  {result.listed_fraction:6.2f}  {result.num_bans:4d}"
    )


def closing_lines(results: Sequence[SeedResult]) -> list[str]:
    """Return what all seeds together show."""
    whole = [result for result in results if not result.broken]
    lines = []
    if whole:
        progress = [result.progress for result in whole]
        healed = [result.healed_after_rounds for result in whole]
        lines += [
            "",
            f"progress: least {min(progress):.2f}, median {statistics.median(progress):.2f};"
            f" healed after rounds: most {max(healed):.1f}, median {statistics.median(healed):.1f}",
            "one peer in one round sends, in bytes, and fetches:",
        ]
        lines += [f"  {kind:<16} {size:12,.0f}" for kind, size in mean_bytes(whole).items()]
        blobs = statistics.fmean(result.blobs_per_peer_round for result in whole)
        states = statistics.fmean(result.states_per_peer_round for result in whole)
        lines += [
            f"  {'blobs fetched':<16} {blobs:12,.2f}",
            f"  {'states fetched':<16} {states:12,.2f}",
        ]
    split = [str(result.seed) for result in whole if result.num_heads != 1]
    broken = [str(result.seed) for result in results if result.broken]
    if split:
        lines.append(f"not on one chain at the end: seed {', '.join(split)}")
    if broken:
        lines.append(f"invariants are broken by seed {', '.join(broken)}")
    else:
        lines.append("all invariants held: I1 to I7 of ROUNDS.md, one state a commit, credit")
    return lines


def mean_bytes(results: Sequence[SeedResult]) -> dict[str, float]:
    """Return the bytes by kind that one peer sends in one round, the mean of all seeds."""
    kinds = sorted({kind for result in results for kind in result.bytes_per_peer_round})
    return {
        kind: statistics.fmean(r.bytes_per_peer_round.get(kind, 0.0) for r in results)
        for kind in kinds
    }
