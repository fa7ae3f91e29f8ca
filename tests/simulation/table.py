"""The rows of ROUNDS.md's table that matter, with the real machine, side by side with its figures.

`python -m tests.simulation.table [--seeds 200] [--first-seed 5000] [--row NAME]... [--runs FILE]`

Every run is 40 rounds of 100 s, the last 8 quiet, with the run's publisher as the first roster, as
there. `C`: runs with conflicting finals and no reset between (I2, or the alarm of rule 18);
`split`: not on one chain at the end; `dbl`: runs with work twice or lost (I3, I4); progress against
T / (round_s + 4 delays + fetch); heights from the tip to the last final commit at the end (the most
of any run), and the most at any time; fork points at which anyone switched, for 100 heights; the
longest time in which tips were not on one chain, in rounds, and the part of it after which nobody
was out of reach of the others any more. A run that breaks a rule ends there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest import mock

from volunteer.lab.simulation.errors import BrokenRule
from volunteer.lab.simulation.member import Member
from volunteer.lab.simulation.scenario import ROUND_S, Scenario
from volunteer.lab.simulation.simulation import LOOK_EVERY_S, Simulation
from volunteer.lab.simulation.world import HOSTILE
from volunteer.rounds.fork_choice import common_ancestor
from volunteer.rounds.watch import Watch

NUM_ROUNDS, QUIET_ROUNDS = 32, 8
LONG_ROUNDS = 20
LEAVES_AT_ROUND = 10
DOUBLE_SIGNING = ("double-commit", "double-vote")
HEADER = "row|runs|C|split|dbl|progress|final lag (max)|forks|longest disagreement"


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of run, and what ROUNDS.md measured for it."""

    scenario: Scenario
    expected: str
    """ROUNDS.md's figures, in the columns' order, the name left out."""
    prepare: Callable[[Simulation], None] | None = None
    are_bans_off: bool = False
    """As in ROUNDS.md: who is caught double signing goes on all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is kept of one run."""

    row: str
    seed: int
    broken: str = ""
    num_heads: int = 1
    progress: float = 0.0
    end_lag: int = 0
    most_final_lag: int = 0
    forks_per_100: float = 0.0
    disagreed_rounds: float = 0.0
    disagreed_whole_rounds: float = 0.0
    """While the net was whole."""
    num_reset_conflicts: int = 0


@dataclass(slots=True)
class ForkCounter:
    """Counts the commits from which somebody has gone over to another branch."""

    simulation: Simulation
    points: set[str] = field(default_factory=set)
    _tips: dict[str, str] = field(default_factory=dict)

    def look(self) -> None:
        """Look now, and again every few seconds."""
        for member in self.simulation.members.values():
            if member.is_reachable and member.machine.tip is not None:
                self._look_at(member)
        self.simulation.world.after(LOOK_EVERY_S, self.look)

    def _look_at(self, member: Member) -> None:
        facts, tip = member.machine.known.facts, member.machine.tip or ""
        before = self._tips.get(member.me, tip)
        if before in facts and not member.machine.work.is_on_chain(before):
            self.points.add(common_ancestor(facts, before, tip))
        self._tips[member.me] = tip


def cut_off(simulation: Simulation, num_alone: int) -> None:
    """Cut the last members off from the others, from round 3 on, for the long partition."""
    names = list(simulation.members)
    islands = {name: int(i >= len(names) - num_alone) for i, name in enumerate(names)}
    world = simulation.world
    world.after(3 * ROUND_S, partial(world.partition.update, islands))
    world.after((3 + LONG_ROUNDS) * ROUND_S, world.partition.clear)


def leave_at_once(simulation: Simulation) -> None:
    """Half of the members go with no last word, until it is quiet."""
    members = list(simulation.members.values())
    for member in members[len(members) // 2 :]:
        simulation.world.after(LEAVES_AT_ROUND * ROUND_S, member.crash)


def _scenario(num_members: int, **faults: object) -> Scenario:
    base = Scenario(
        num_members=num_members, num_rounds=NUM_ROUNDS, quiet_rounds=QUIET_ROUNDS, is_open=False
    )
    return replace(base, **faults)  # type: ignore[arg-type]  # names of its fields


def _liar(**faults: object) -> Scenario:
    return _scenario(3, net=HOSTILE, num_liars=1, lies=DOUBLE_SIGNING, **faults)


ROWS = {
    "N=3, hostile, then healed": Row(_scenario(3, net=HOSTILE), "120|0|0|0|0.84|2.0 (2)|37|7.0"),
    "N=4, hostile, then healed": Row(_scenario(4, net=HOSTILE), "80|0|0|0|0.79|2.0 (2)|46|6.2"),
    "2-2 for 20 rounds": Row(
        _scenario(4), "10|0, 10 by reset|0|0|0.92|2.0 (2)|5|20", partial(cut_off, num_alone=2)
    ),
    "3-1 for 20 rounds": Row(
        _scenario(4), "10|0, 10 by reset|0|0|0.93|2.0 (2)|5|20", partial(cut_off, num_alone=1)
    ),
    "crashes, one in 5 a round, N=4": Row(
        _scenario(4, crash_rate=0.2), "20|0|0|0|0.87|2.0 (2)|21|0.2"
    ),
    "sleeps of about 6 rounds, N=4": Row(
        _scenario(4, sleep_rate=0.06), "24|0|0|0|0.87|2.0 (2)|10|0.2"
    ),
    "half leave at once, N=8": Row(_scenario(8), "5|0|0|0|0.91|2.0 (2)|0-3|0.2", leave_at_once),
    "double signing, 1 of 3, hostile, quorum 1/2, no bans": Row(
        _liar(), "180|0|8 mid-fork|0|0.87|2.3 (32)|51|11.8", are_bans_off=True
    ),
    "double signing, 1 of 3, hostile, quorum 2/3, no bans": Row(
        _liar(quorum=(2, 3)), "120|0|4 mid-fork|0|0.86|4.5 (32)|51|11.8", are_bans_off=True
    ),
    "the same with bans, quorum 1/2": Row(_liar(), "not simulated"),
    "the same with bans, quorum 2/3": Row(_liar(quorum=(2, 3)), "not simulated"),
}


def run_one(name: str, seed: int) -> Run:
    """Run one seed of one row."""
    row = ROWS[name]
    bans = mock.patch.object(Watch, "see", return_value=None) if row.are_bans_off else nullcontext()
    with bans:
        return _run(name, row, seed)


def _run(name: str, row: Row, seed: int) -> Run:
    simulation = Simulation(row.scenario, seed)
    forks = ForkCounter(simulation)
    simulation.world.after(LOOK_EVERY_S, forks.look)
    if row.prepare is not None:
        row.prepare(simulation)
    try:
        report = simulation.run()
    except BrokenRule as broken:
        return Run(row=name, seed=seed, broken=str(broken))
    return Run(
        row=name,
        seed=seed,
        num_heads=len(report.heads),
        progress=report.progress,
        end_lag=max(_lag(member) for member in simulation.members.values()),
        most_final_lag=report.most_final_lag,
        forks_per_100=100 * len(forks.points) / max(1, report.height),
        disagreed_rounds=report.disagreed_s / ROUND_S,
        disagreed_whole_rounds=report.disagreed_whole_s / ROUND_S,
        num_reset_conflicts=report.num_reset_conflicts,
    )


def _lag(member: Member) -> int:
    facts = member.machine.known.facts[member.machine.tip or member.rules.genesis_id]
    return facts.height - facts.final_height


def line_of(name: str, runs: list[Run]) -> str:
    """Return the row of the table that these runs make."""
    whole = [run for run in runs if not run.broken]
    conflicts = [r for r in runs if r.broken.startswith("I2") or "alarm" in r.broken]
    double = [r for r in runs if r.broken.startswith(("I3", "I4"))]
    others = len(runs) - len(whole) - len(conflicts) - len(double)
    by_reset = sum(run.num_reset_conflicts > 0 for run in whole)
    longest = [run.disagreed_rounds for run in whole]
    most_whole = max((run.disagreed_whole_rounds for run in whole), default=0.0)
    mean, most = partial(_mean, whole), partial(_most, whole)
    cells = (
        name,
        str(len(runs)) + (f", {others} broke another rule" if others else ""),
        str(len(conflicts)) + (f", {by_reset} by reset" if by_reset else ""),
        str(sum(run.num_heads > 1 for run in whole)),
        str(len(double)),
        f"{mean('progress'):.2f}",
        f"{mean('end_lag'):.1f} ({most('end_lag')}), in the run {most('most_final_lag')}",
        f"{mean('forks_per_100'):.0f}",
        f"{max(longest, default=0):.1f}, median {statistics.median(longest or [0]):.1f};"
        f" {most_whole:.1f} with the net whole",
    )
    return "|".join(cells)


def _most(runs: list[Run], name: str) -> int:
    return max((getattr(run, name) for run in runs), default=0)


def _mean(runs: list[Run], name: str) -> float:
    return statistics.fmean(getattr(run, name) for run in runs) if runs else 0.0


def table(runs: Iterable[Run]) -> Iterator[str]:
    """Yield the lines of the table, each row twice: here and in ROUNDS.md."""
    kept = list(runs)
    yield f"| {HEADER.replace('|', ' | ')} |"
    yield "|---" * len(HEADER.split("|")) + "|"
    for name, row in ROWS.items():
        own = [run for run in kept if run.row == name]
        if own:
            yield f"| {line_of(name, own).replace('|', ' | ')} |"
            yield f"| *ROUNDS.md* | {row.expected.replace('|', ' | ')} |"


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=5000)
    parser.add_argument("--row", action="append", choices=list(ROWS))
    parser.add_argument("--runs", type=Path, help="keep each run here; those here are not rerun")
    options = parser.parse_args(arguments)
    runs = []
    if options.runs and options.runs.exists():
        lines = options.runs.read_text(encoding="utf-8").splitlines()
        runs = [Run(**json.loads(line)) for line in lines]
    done = {(run.row, run.seed) for run in runs}
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for name in options.row or ROWS:
            if (name, seed) in done:
                continue
            runs.append(run_one(name, seed))
            if options.runs:
                with options.runs.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(runs[-1])) + "\n")
    sys.stdout.write("\n".join(table(runs)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
