"""Scenarios: who takes part, what goes wrong, and how it is to end."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial

from volunteer.lab.simulation.member import Member
from volunteer.lab.simulation.referee import Referee
from volunteer.lab.simulation.trainer_model import Contents
from volunteer.lab.simulation.world import USUAL, Net, World
from volunteer.rounds.chain import ChainRules
from volunteer.rounds.records import genesis_id
from volunteer.rounds.turn import Timing

ROUND_S = 100.0
RUN_ID = "5a" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of run; rates are per member and round."""

    num_members: int
    num_rounds: int = 24
    quiet_rounds: int = 8
    """At the end nothing goes wrong any more, and all are there."""
    net: Net = USUAL
    is_open: bool = True
    """Whether the run has no publisher."""
    crash_rate: float = 0.0
    sleep_rate: float = 0.0
    """Crashes that last about 6 rounds."""
    pause_rate: float = 0.0
    partition_rate: float = 0.0
    """Of the whole net, for half a round to three rounds."""
    split_rounds: int = 0
    """One long partition in two halves, from round 3 on."""
    num_newcomers: int = 0
    """Of the members, these come later, one every three rounds."""
    num_liars: int = 0
    """Of the members, these sign two things of which only one may be."""
    expiry_rounds: int = 8
    quorum: tuple[int, int] = (1, 2)
    grace_s: float = 8.0
    failover_s: float = 20.0


@dataclass(slots=True)
class Report:
    """How a run went."""

    height: int
    ideal_height: float
    heads: Counter[str]
    forks_per_100: float
    mean_final_lag: float
    most_final_lag: int
    num_dropped: int
    num_reset_conflicts: int
    listed_fraction: float
    """Tokens listed on the final chain, of all that were kept."""
    disagreed_s: float
    """The longest time for which tips of members that were up differed by more than one height."""

    @property
    def progress(self) -> float:
        """Heights reached against the ideal."""
        return self.height / self.ideal_height


@dataclass(slots=True)
class Simulation:
    """A scenario with a seed, being run."""

    scenario: Scenario
    seed: int
    rng: random.Random = field(init=False)
    world: World = field(init=False)
    contents: Contents = field(default_factory=Contents)
    referee: Referee = field(init=False)
    members: dict[str, Member] = field(default_factory=dict)
    is_quiet: bool = False
    _moved: dict[str, str] = field(default_factory=dict)
    num_switches: int = 0
    _differ_since_s: float | None = None
    _disagreed_s: float = 0.0

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.rng = random.Random(self.seed)
        self.world = World(self.rng, scenario.net)
        names = [f"peer-{i:02d}" for i in range(scenario.num_members)]
        liars = names[1 : 1 + scenario.num_liars]
        self.referee = Referee(self.contents, frozenset(names) - frozenset(liars))
        numerator, denominator = scenario.quorum
        rules = ChainRules(
            run_id=RUN_ID,
            module_id="dense",
            genesis_id=genesis_id(RUN_ID, "dense"),
            publisher="" if scenario.is_open else names[0],
            expiry_rounds=scenario.expiry_rounds,
            demote_rounds=8,
            max_contributions=32,
            quorum_numerator=numerator,
            quorum_denominator=denominator,
        )
        for name in names:
            self.members[name] = Member(
                me=name,
                rules=rules,
                timing=self._timing,
                world=self.world,
                contents=self.contents,
                referee=self.referee,
                peers=self.members,
                is_liar=name in liars,
                tokens_per_s=self.rng.choice((5.0, 10.0, 20.0)),
            )

    def _timing(self) -> Timing:
        return Timing(
            round_s=ROUND_S, grace_s=self.scenario.grace_s, failover_s=self.scenario.failover_s
        )

    def run(self) -> Report:
        """Run to the end and report; raises BrokenRule as soon as an invariant does not hold."""
        scenario = self.scenario
        members = list(self.members.values())
        first = len(members) - scenario.num_newcomers
        for i, member in enumerate(members):
            late_s = 3 * ROUND_S * max(0, i - first + 1)
            self.world.after(late_s + self.rng.uniform(0, 5), member.start)
        for i in range(1, scenario.num_rounds):
            self.world.after(i * ROUND_S, self._trouble)
        if scenario.split_rounds:
            self.world.after(3 * ROUND_S, self._split_for_long)
        self.world.after(scenario.num_rounds * ROUND_S, self._calm_down)
        total_s = (scenario.num_rounds + scenario.quiet_rounds) * ROUND_S
        self._look()
        self.world.run_until(total_s)
        for member in members:
            if member.trainer is not None and member.trainer.is_idle:
                self.referee.check_books(member)
        return self._report()

    # -------------------------------------------------------------------------------- trouble

    def _trouble(self) -> None:
        """Once a round, until it is quiet: draw what goes wrong."""
        if self.is_quiet:
            return
        scenario, rng = self.scenario, self.rng
        if scenario.net.most_blocked:
            self.world.redraw_blocked(list(self.members))
        if rng.random() < scenario.partition_rate:
            self._split(rng.uniform(0.5, 3.0) * ROUND_S)
        for member in self.members.values():
            at_s = rng.uniform(0, ROUND_S)
            if rng.random() < scenario.crash_rate:
                self.world.after(at_s, partial(self._crash, member, rng.expovariate(1 / 30.0)))
            if rng.random() < scenario.sleep_rate:
                for_s = rng.expovariate(1 / (6 * ROUND_S))
                self.world.after(at_s, partial(self._crash, member, for_s))
            if rng.random() < scenario.pause_rate:
                for_s = rng.uniform(0.2, 4.0) * ROUND_S
                self.world.after(at_s, partial(self._pause, member, for_s))

    def _crash(self, member: Member, for_s: float) -> None:
        if member.is_up and not self.is_quiet:
            member.crash()
            self.world.after(for_s, partial(self._restart, member))

    def _restart(self, member: Member) -> None:
        if not member.is_up:
            member.start()

    def _pause(self, member: Member, for_s: float) -> None:
        if not self.is_quiet:
            member.pause()
            self.world.after(for_s, member.resume)

    def _split(self, for_s: float) -> None:
        self.world.partition = {name: self.rng.randrange(2) for name in self.members}
        self.world.after(for_s, self.world.partition.clear)

    def _split_for_long(self) -> None:
        half = len(self.members) // 2
        self.world.partition = {name: i // half for i, name in enumerate(self.members)}
        self.world.after(self.scenario.split_rounds * ROUND_S, self.world.partition.clear)

    def _calm_down(self) -> None:
        self.is_quiet = True
        self.world.blocked.clear()
        self.world.partition.clear()
        has_gossip = self.scenario.net.has_gossip
        self.world.net = replace(USUAL, has_gossip=has_gossip)
        for member in self.members.values():
            self._restart(member)
            member.resume()

    # -------------------------------------------------------------------------------- looking

    def _look(self) -> None:
        """Every few seconds: count switches, and how long tips differ."""
        for name, member in self.members.items():
            tip = member.machine.tip if member.is_up else None
            if tip is None:
                continue
            before = self._moved.get(name)
            facts = member.machine.known.facts
            if before is not None and before not in member.machine.work.chain and before in facts:
                self.num_switches += 1
            self._moved[name] = tip
        if self._do_tips_differ():
            if self._differ_since_s is None:
                self._differ_since_s = self.world.now_s
            for_s = self.world.now_s - self._differ_since_s
            self._disagreed_s = max(self._disagreed_s, for_s)
        else:
            self._differ_since_s = None
        self.world.after(5.0, self._look)

    def _do_tips_differ(self) -> bool:
        up = [
            m.machine
            for m in self.members.values()
            if m.is_up and m.is_contributing and not m.is_liar
        ]
        tips = {m.tip for m in up if m.tip is not None}
        return any(
            not any(tip in m.work.chain or m.tip in self._chain_above(tip) for m in up[:1])
            for tip in tips
        )

    def _chain_above(self, tip: str) -> list[str]:
        for member in self.members.values():
            if member.is_up and member.machine.tip == tip:
                return member.machine.work.chain
        return []

    def _head_of(self, member: Member, chain: list[str]) -> str:
        """Return the tip, or the tallest's if it is that one or just about to move there."""
        tip = member.machine.tip or ""
        return chain[-1] if tip in chain[-3:] else tip

    def _report(self) -> Report:
        members = [m for m in self.members.values() if not m.is_liar]
        tallest = max(members, key=lambda m: len(m.machine.work.chain)).machine
        heads = Counter(self._head_of(member, tallest.work.chain) for member in members)
        height = len(tallest.work.chain) - 1
        net, scenario = self.scenario.net, self.scenario
        ideal = scenario.num_rounds * ROUND_S / (ROUND_S + 4 * net.median_s + net.fetch_s)
        ideal += scenario.quiet_rounds * ROUND_S / (ROUND_S + 4 * USUAL.median_s + USUAL.fetch_s)
        lags = self.referee.final_lags
        kept = {u for m in members for u in self.referee.kept.get(m.me, ())}
        on_chain = self.referee.units_on_chain(tallest.tip or "")
        listed = sum(unit.tokens for unit in kept & on_chain)
        return Report(
            height=height,
            ideal_height=ideal,
            heads=heads,
            forks_per_100=100 * self.num_switches / max(1, height),
            mean_final_lag=sum(lags) / max(1, len(lags)),
            most_final_lag=max(lags, default=0),
            num_dropped=sum(len(member.disk.dropped) for member in members),
            num_reset_conflicts=self.referee.num_resets_conflicts,
            listed_fraction=listed / max(1, sum(unit.tokens for unit in kept)),
            disagreed_s=self._disagreed_s,
        )
