"""Measure what real agents send, by purpose: the share of control traffic at the size of `commons`.

PYTHONPATH=. python packaging/benchmarks/bench_traffic.py [--agents 2 4 8] [--rounds 1] [--duty 1.0]

Needs a checkout, Linux and root: the agents run in network namespaces (tests/system/network.py).
They train the model of the built-in run `commons`, with its codec and all its periods: a round is
600 s. It is watched from the end of one exchange to the end of another, and what is sent is told
apart:

    quiet     between the exchanges: bytes per second
    exchange  around the close and the commit of a round, less what the quiet would have cost
              meanwhile: bytes per round
    a round costs exchange + 600 x quiet

`--duty` is how much of the time each agent trains: eight at a tenth leave two cores enough to talk.
With `--target-tokens` rounds end long before their time, which shows what a round costs and hides
what is done every few minutes. Control is all that is not a blob: what noise, yamux and TCP add to
the blobs counts as control. The sums are held against the counters of the interfaces.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from tests.system.agents import wait_until
from tests.system.swarms import LocalSwarm, NodeAgent, local_swarm, wait_contributing
from volunteer.data.builtin import load_builtin_run
from volunteer.run import RunSpec

BLOBS = ("contributions", "states")
SAMPLE_EVERY_S = 1.0
BEFORE_S, AFTER_S = 3.0, 40.0
"""Around each moment in which a record or a contribution travels: this belongs to the exchange. A
new tip is offered to others for 1.5 periods of a sync, 27 s in rounds of 600 s."""
WARM_UP_ROUNDS = 1
"""Before that, nobody knows whom to expect, and peers are looked for."""
UP_S = 300.0
ROUND_DEADLINE_S = 900.0
WATCH_S = 7200.0
DIRECTIONS = ("sent", "received")


class Sample(NamedTuple):
    """All agents' counters at one moment."""

    at_s: float
    bytes: dict[tuple[str, str], int]
    """(purpose, direction) -> bytes, of all agents together."""
    round_index: int
    """The lowest one."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one swarm was seen to send."""

    num_agents: int
    num_rounds: int
    quiet_s: float
    exchange_s: float
    per_second: dict[tuple[str, str], float]
    """Of one agent."""
    per_round: dict[tuple[str, str], float]
    """Of one agent."""
    interface: dict[str, float]
    """Of one agent, direction -> bytes in the whole time."""
    told: dict[str, float]
    """The same as the agents account for it, multicast included."""

    def in_round(self, purpose: str, direction: str, round_s: float) -> float:
        """Return the bytes of one agent in a round of `round_s`."""
        key = (purpose, direction)
        return self.per_round.get(key, 0.0) + round_s * self.per_second.get(key, 0.0)


def commons_spec(target_tokens: int) -> RunSpec:
    """Return `commons` under another name, with a token target and a short evaluation."""
    commons = load_builtin_run("commons")
    return msgspec.structs.replace(
        commons,
        name="traffic",
        rounds=msgspec.structs.replace(commons.rounds, target_tokens=target_tokens),
        evaluation=msgspec.structs.replace(commons.evaluation, num_sequences=4),
    )


def measure(num_agents: int, num_rounds: int, target_tokens: int, duty: float) -> Result:
    """Run a swarm until it has committed so many rounds after its warm-up."""
    with (
        tempfile.TemporaryDirectory() as folder,
        local_swarm(Path(folder), spec=commons_spec(target_tokens)) as swarm,
    ):
        lan = swarm.network.add_bridge()
        agents = [swarm.add(lan) for _ in range(num_agents)]
        for agent in agents:
            agent.locations.prepare()
            agent.locations.config_file.write_text(f"duty_fraction = {duty}\n", "utf-8")
        swarm.start(*agents)
        wait_contributing(agents, UP_S)
        wait_until(
            "all are connected",
            lambda: all(a.status().num_peers == num_agents - 1 for a in agents),
            UP_S,
        )
        deadline_s = ROUND_DEADLINE_S * WARM_UP_ROUNDS
        wait_until("the warm-up", lambda: lowest_round(agents) >= WARM_UP_ROUNDS, deadline_s)
        # It begins as it ends: when an exchange is over.
        _watch(agents, lambda s: s[-1].at_s > AFTER_S and _is_quiet(s, AFTER_S))
        before, last = _outside(swarm), lowest_round(agents) + num_rounds
        samples = _watch(
            agents, lambda s: s[-1].round_index >= last and _is_quiet(s, AFTER_S + SAMPLE_EVERY_S)
        )
        return summarise(samples, before, _outside(swarm), num_agents)


def lowest_round(agents: Sequence[NodeAgent]) -> int:
    """Return the height that all have reached."""
    return min(agent.status().round_index for agent in agents)


def _outside(swarm: LocalSwarm) -> dict[tuple[str, str], int]:
    """Return ("interface" or "mdns", direction) -> bytes, as the kernel counts them."""
    counts: Counter[tuple[str, str]] = Counter()
    for agent in swarm.agents:
        for what, pair in (
            ("interface", swarm.network.interface_bytes(agent.node)),
            ("mdns", swarm.network.multicast_bytes(agent.node)),
        ):
            for direction, size in zip(DIRECTIONS, pair, strict=True):
                counts[what, direction] += size
    return counts


def _watch(
    agents: Sequence[NodeAgent], is_over: Callable[[Sequence[Sample]], bool]
) -> list[Sample]:
    """Look at the counters every second until `is_over` of what was seen."""
    samples: list[Sample] = []
    begun_s = time.monotonic()

    def look() -> bool:
        now_s = time.monotonic() - begun_s
        if samples and now_s < samples[-1].at_s + SAMPLE_EVERY_S:
            return False
        counts: Counter[tuple[str, str]] = Counter()
        statuses = [agent.status() for agent in agents]
        for status in statuses:
            for purpose, pair in status.bytes_by_purpose.items():
                for direction in DIRECTIONS:
                    counts[purpose, direction] += pair[direction]
        lowest = min(status.round_index for status in statuses)
        samples.append(Sample(now_s, dict(counts), lowest))
        return is_over(samples)

    wait_until("the rounds", look, WATCH_S)
    return samples


def _activity(sample: Sample) -> int:
    """Return what grows only while a round is being closed and committed."""
    purposes = ("contributions", "records", "states")
    return sum(sample.bytes.get((p, d), 0) for p in purposes for d in DIRECTIONS)


def _is_quiet(samples: Sequence[Sample], duration_s: float) -> bool:
    """Return whether no record or contribution has travelled for so long."""
    latest = samples[-1]
    lately = [s for s in samples if s.at_s >= latest.at_s - duration_s]
    return len({_activity(sample) for sample in lately}) == 1


def summarise(
    samples: Sequence[Sample],
    before: dict[tuple[str, str], int],
    after: dict[tuple[str, str], int],
    num_agents: int,
) -> Result:
    """Tell apart what a second costs and what a round costs."""
    busy_at_s = [b.at_s for a, b in itertools.pairwise(samples) if _activity(a) != _activity(b)]
    seconds = {True: 0.0, False: 0.0}
    totals: dict[bool, Counter[tuple[str, str]]] = {True: Counter(), False: Counter()}
    for a, b in itertools.pairwise(samples):
        is_busy = any(a.at_s - AFTER_S <= at_s <= b.at_s + BEFORE_S for at_s in busy_at_s)
        seconds[is_busy] += b.at_s - a.at_s
        for key, size in b.bytes.items():
            totals[is_busy][key] += size - a.bytes.get(key, 0)
    duration_s = samples[-1].at_s - samples[0].at_s
    num_rounds = samples[-1].round_index - samples[0].round_index
    per_second = {key: size / seconds[False] / num_agents for key, size in totals[False].items()}
    for direction in DIRECTIONS:
        key = ("mdns", direction)
        per_second[key] = (after[key] - before[key]) / duration_s / num_agents
    per_round = {
        key: (size / num_agents - seconds[True] * per_second.get(key, 0.0)) / num_rounds
        for key, size in totals[True].items()
    }
    told = {
        d: sum(
            size - samples[0].bytes.get((p, d), 0)
            for (p, e), size in samples[-1].bytes.items()
            if e == d
        )
        + after["mdns", d]
        - before["mdns", d]
        for d in DIRECTIONS
    }
    return Result(
        num_agents=num_agents,
        num_rounds=num_rounds,
        quiet_s=seconds[False],
        exchange_s=seconds[True],
        per_second=per_second,
        per_round=per_round,
        interface={
            d: (after["interface", d] - before["interface", d]) / num_agents for d in DIRECTIONS
        },
        told={d: size / num_agents for d, size in told.items()},
    )


def tell(result: Result, round_s: float) -> None:
    """Print one swarm's table."""
    print(
        f"\n{result.num_agents} agents, {result.num_rounds} rounds, {result.quiet_s:.0f} s quiet"
        f" and {result.exchange_s:.0f} s of exchanges; per agent and round of {round_s:g} s"
    )
    print(
        f"  {'purpose':14} {'sent':>12} {'received':>12} {'share':>8}"
        f"   {'per round':>10} {'per second':>10}  (sent and received)"
    )
    purposes = sorted({purpose for purpose, _ in (*result.per_second, *result.per_round)})
    blobs = sum(result.in_round(p, d, round_s) for p in BLOBS for d in DIRECTIONS)
    control = 0.0
    for purpose in [*BLOBS, *(p for p in purposes if p not in BLOBS)]:
        sent, received = (result.in_round(purpose, d, round_s) for d in DIRECTIONS)
        per_round, per_second = (
            sum(part.get((purpose, d), 0.0) for d in DIRECTIONS)
            for part in (result.per_round, result.per_second)
        )
        share = (sent + received) / blobs
        control += 0.0 if purpose in BLOBS else share
        print(
            f"  {purpose:14} {sent:12,.0f} {received:12,.0f} {share:8.2%}"
            f"   {per_round:10,.0f} {per_second:10.1f}"
        )
    print(f"  control traffic is {control:.2%} of the blobs")
    for direction in DIRECTIONS:
        seen, told = result.interface[direction], result.told[direction]
        print(
            f"  interface, {direction}: {seen:,.0f} bytes in all, accounted {told:,.0f};"
            f" TCP, IP and Ethernet add {seen / told - 1:.1%}"
        )
    sys.stdout.flush()


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[2, 4, 8], metavar="N")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--target-tokens", type=int, default=0)
    parser.add_argument("--duty", type=float, default=1.0)
    parser.add_argument("--round-s", type=float, default=600.0)
    options = parser.parse_args()
    for num_agents in options.agents:
        result = measure(num_agents, options.rounds, options.target_tokens, options.duty)
        tell(result, options.round_s)


if __name__ == "__main__":
    main()
