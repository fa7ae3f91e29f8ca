"""Many seeds of one scenario, one line of a CSV file each; goes on where it was stopped.

`python -m tests.simulation.battery FILE [--first-seed 0] [--seeds 1000] [--peers 30] [--rounds 30]
[--faults all|LIST] [--mesh 0]`

Seeds that the file has are not run again. Exit status 1: a seed broke an invariant, or did not end
on one chain. `docs/lab/` keeps what was measured.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from volunteer.lab.simulation.faults import make_scenario, parse_faults
from volunteer.lab.simulation.scenario import Scenario
from volunteer.lab.simulation.summary import SeedResult, run_seeds

COLUMNS = (
    "seed",
    "cpu_s",
    "height",
    "progress",
    "healed_rounds",
    "disagreed_rounds",
    "heads",
    "finals",
    "mean_final_lag",
    "most_final_lag",
    "dropped",
    "bans",
    "listed",
    "excluded",
    "struck",
    "broken",
)


def row_of(result: SeedResult, cpu_s: float) -> list[object]:
    """Return the line of one seed."""
    return [
        result.seed,
        round(cpu_s, 1),
        result.height,
        round(result.progress, 3),
        round(result.healed_after_rounds, 2),
        round(result.disagreed_rounds, 2),
        result.num_heads,
        result.num_finals,
        round(result.mean_final_lag, 2),
        result.most_final_lag,
        result.num_dropped,
        result.num_bans,
        round(result.listed_fraction, 3),
        result.num_excluded,
        result.num_struck,
        result.broken,
    ]


def columns_of(file: Path) -> list[str]:
    """Return the columns that a file has: one begun by an older version may lack some."""
    if not file.exists():
        return list(COLUMNS)
    with file.open(encoding="utf-8", newline="") as lines:
        return next(csv.reader(lines))


def done_in(file: Path) -> set[int]:
    """Return the seeds that a file has."""
    if not file.exists():
        return set()
    with file.open(encoding="utf-8", newline="") as lines:
        return {int(row["seed"]) for row in csv.DictReader(lines)}


def run(scenario: Scenario, seeds: range, file: Path) -> Iterator[SeedResult]:
    """Run the seeds that `file` lacks, and add each as soon as it is done."""
    done, columns = done_in(file), columns_of(file)
    is_new = not file.exists()
    with file.open("a", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
        if is_new:
            writer.writeheader()
        for seed in seeds:
            if seed in done:
                continue
            began_s = time.process_time()
            (result,) = run_seeds(scenario, [seed])
            row = row_of(result, time.process_time() - began_s)
            writer.writerow(dict(zip(COLUMNS, row, strict=True)))
            out.flush()
            yield result


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--peers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--faults", default="all")
    parser.add_argument("--mesh", type=int, default=0)
    options = parser.parse_args(arguments)
    faults = parse_faults(options.faults)
    scenario = make_scenario(options.peers, options.rounds, faults, mesh_degree=options.mesh)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    results = list(run(scenario, seeds, options.file))
    return int(not all(result.is_right for result in results))


if __name__ == "__main__":
    sys.exit(main())
