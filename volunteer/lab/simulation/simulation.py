"""A scenario with a seed, being run to its end.

Runs in: simulation.
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from volunteer.lab.simulation.byzantine import WORK_LIES, Liar
from volunteer.lab.simulation.disagreement import Disagreement
from volunteer.lab.simulation.exchange import are_cut_off
from volunteer.lab.simulation.gossip import Mesh, draw_mesh
from volunteer.lab.simulation.judged import Judged
from volunteer.lab.simulation.member import Member
from volunteer.lab.simulation.referee import Referee
from volunteer.lab.simulation.report import Report, heads_of, is_on_chain_of, tallest_of
from volunteer.lab.simulation.scenario import ROUND_S, RUN_ID, Scenario
from volunteer.lab.simulation.traffic import Traffic
from volunteer.lab.simulation.trainer_model import Contents
from volunteer.lab.simulation.trouble import Trouble
from volunteer.lab.simulation.world import USUAL, World
from volunteer.rounds.chain import ChainRules
from volunteer.rounds.records import genesis_id
from volunteer.rounds.turn import Timing

LOOK_EVERY_S = 5.0
HEALED_ROUNDS = 2.0
"""How long a run goes on once all have the same head again."""


@contextlib.contextmanager
def _few_collections() -> Iterator[None]:
    """Look for garbage in cycles less often: nearly nothing is one, and all is looked at."""
    before = gc.get_threshold()
    gc.set_threshold(1_000_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(slots=True)
class Simulation:
    """One run."""

    scenario: Scenario
    seed: int
    rng: random.Random = field(init=False)
    world: World = field(init=False)
    contents: Contents = field(default_factory=Contents)
    traffic: Traffic = field(default_factory=Traffic)
    judged: Judged = field(default_factory=Judged)
    referee: Referee = field(init=False)
    trouble: Trouble = field(init=False)
    members: dict[str, Member] = field(default_factory=dict)
    num_switches: int = 0
    _moved: dict[str, str] = field(default_factory=dict)
    _healed_at_s: float | None = None
    _disagreement: Disagreement = field(default_factory=Disagreement)

    def __post_init__(self) -> None:
        """Draw who takes part."""
        scenario = self.scenario
        self.rng = random.Random(self.seed)
        self.world = World(self.rng, scenario.net)
        names = [f"peer-{i:02d}" for i in range(scenario.num_members)]
        liars = names[1 : 1 + scenario.num_liars]
        self.contents.is_judged = not WORK_LIES.keys().isdisjoint(scenario.lies)
        rules = self._rules(names[0])
        honest = frozenset(names) - frozenset(liars)
        self.referee = Referee(self.contents, honest, rules.genesis_id)
        mesh = None
        if scenario.net.mesh_degree:
            neighbours = draw_mesh(names, scenario.net.mesh_degree, self.rng)
            mesh = Mesh(self.world, neighbours, self._is_reachable, self._are_cut_off)
        for name in names:
            self.members[name] = self._member(name, rules, mesh, is_liar=name in liars)
        self.trouble = Trouble(scenario, self.world, self.members, self.rng)

    def _rules(self, publisher: str) -> ChainRules:
        scenario = self.scenario
        numerator, denominator = scenario.quorum
        return ChainRules(
            run_id=RUN_ID,
            module_id="dense",
            genesis_id=genesis_id(RUN_ID, "dense"),
            publisher="" if scenario.is_open else publisher,
            expiry_rounds=scenario.expiry_rounds,
            demote_rounds=8,
            max_contributions=scenario.max_contributions,
            quorum_numerator=numerator,
            quorum_denominator=denominator,
        )

    def _member(self, name: str, rules: ChainRules, mesh: Mesh | None, *, is_liar: bool) -> Member:
        scenario, rng = self.scenario, self.rng
        spread = scenario.speed_range**0.5
        tokens_per_s, slowness = rng.choice((5.0, 10.0, 20.0)), 1.0
        if spread > 1.0:
            tokens_per_s = 10.0 * spread ** rng.uniform(-1.0, 1.0)
            slowness = spread ** rng.uniform(-1.0, 1.0)
        member = Member(
            me=name,
            rules=rules,
            timing=self._timing,
            world=self.world,
            contents=self.contents,
            traffic=self.traffic,
            judged=self.judged,
            referee=self.referee,
            peers=self.members,
            tokens_per_s=tokens_per_s,
            slowness=slowness,
            mesh=mesh,
        )
        if is_liar:
            lies = scenario.lies
            if scenario.lies_per_liar:
                lies = tuple(rng.sample(lies, min(scenario.lies_per_liar, len(lies))))
            member.liar = Liar(frozenset(lies), rng)
            member.liar.member = member
        return member

    def _timing(self) -> Timing:
        return Timing(
            round_s=ROUND_S, grace_s=self.scenario.grace_s, failover_s=self.scenario.failover_s
        )

    def _is_reachable(self, peer: str) -> bool:
        return self.members[peer].is_reachable

    def _are_cut_off(self, one: str, other: str) -> bool:
        return are_cut_off(self.members[one], self.members[other])

    def run(self) -> Report:
        """Run to the end and report; raises BrokenRule as soon as an invariant does not hold."""
        scenario = self.scenario
        members = list(self.members.values())
        first = len(members) - scenario.num_newcomers
        for i, member in enumerate(members):
            late_s = 3 * ROUND_S * max(0, i - first + 1)
            self.world.after(late_s + self.rng.uniform(0, 5), member.start)
        for i in range(1, scenario.num_rounds):
            self.world.after(i * ROUND_S, self.trouble.begin_round)
        if scenario.split_rounds:
            self.world.after(3 * ROUND_S, self.trouble.split_for_long)
        self.world.after(scenario.num_rounds * ROUND_S, self._calm_down)
        self._look()
        with _few_collections():
            self.world.run_until((scenario.num_rounds + scenario.quiet_rounds) * ROUND_S)
        for member in members:
            self.referee.check_at_end(member)
        return self._report()

    def _calm_down(self) -> None:
        net = self.scenario.net
        self.world.net = replace(USUAL, has_gossip=net.has_gossip, mesh_degree=net.mesh_degree)
        self.trouble.end()

    # -------------------------------------------------------------------------------- looking

    def _look(self) -> None:
        """Every few seconds: count switches, and how long tips differ."""
        reachable = [m for m in self.members.values() if m.is_reachable]
        up = [m for m in reachable if m.machine.tip is not None]
        for member in up:
            tip, before = member.machine.tip or "", self._moved.get(member.me)
            if before != tip:
                known = member.machine.known
                if before in known.facts and not member.machine.work.is_on_chain(before):
                    self.num_switches += 1
                self._moved[member.me] = tip
        honest = [m for m in up if m.is_contributing and not m.is_liar]
        now_s = self.world.now_s
        is_one = not honest or self._are_on_one_chain(honest)
        self._disagreement.look(now_s, is_one, lambda: self.world.is_whole([m.me for m in up]))
        all_stand = len(up) == len(reachable)
        is_quiet = self.trouble.is_quiet and all_stand and bool(honest) and is_one
        if is_quiet and len(heads_of(honest, tallest_of(honest))) == 1:
            self._note_one_head(now_s)
        self.world.after(LOOK_EVERY_S, self._look)

    def _note_one_head(self, now_s: float) -> None:
        if self._healed_at_s is None:
            self._healed_at_s = now_s
        is_long_ago = now_s - self._healed_at_s >= HEALED_ROUNDS * ROUND_S
        self.world.is_over = is_long_ago and self.scenario.ends_when_healed

    def _are_on_one_chain(self, members: list[Member]) -> bool:
        tallest = tallest_of(members)
        return all(is_on_chain_of(member, tallest) for member in members)

    # ------------------------------------------------------------------------------ reporting

    def _report(self) -> Report:
        members = [m for m in self.members.values() if not m.is_liar]
        tallest = tallest_of(members)
        height = len(tallest.machine.work.chain) - 1
        lags = self.referee.final_lags
        kept = {u for m in members for u in self.referee.kept.get(m.me, ())}
        on_chain = self.referee.units_on_chain(tallest.machine.tip or "")
        listed = sum(unit.tokens for unit in kept & on_chain)
        healed_at_s = self.world.now_s if self._healed_at_s is None else self._healed_at_s
        return Report(
            height=height,
            ideal_height=self._ideal_height(),
            heads=heads_of(members, tallest),
            forks_per_100=100 * self.num_switches / max(1, height),
            mean_final_lag=sum(lags) / max(1, len(lags)),
            most_final_lag=max(lags, default=0),
            num_finals=len(lags),
            num_dropped=sum(len(member.disk.dropped) for member in members),
            num_reset_conflicts=self.referee.num_resets_conflicts,
            listed_fraction=listed / max(1, sum(unit.tokens for unit in kept)),
            disagreed_s=self._disagreement.longest_s,
            disagreed_whole_s=self._disagreement.longest_whole_s,
            healed_after_s=healed_at_s - self.scenario.num_rounds * ROUND_S,
            num_bans=self.referee.num_bans,
            num_excluded=len(self.referee.excluded),
            num_struck=len(self.referee.struck),
            num_refused=sum(member.exchange.num_refused for member in members),
            bytes_by_kind=dict(self.traffic.sent_bytes),
            num_blobs=self.traffic.num_fetched["blobs"],
            num_states=self.traffic.num_fetched["states"],
            num_peer_rounds=len(self.members) * max(1, height),
        )

    def _ideal_height(self) -> float:
        """Return the heights that this time is good for if nothing ever goes wrong."""
        net, scenario = self.scenario.net, self.scenario
        quiet_s = self.world.now_s - scenario.num_rounds * ROUND_S
        ideal = scenario.num_rounds * ROUND_S / (ROUND_S + 4 * net.median_s + net.fetch_s)
        return ideal + quiet_s / (ROUND_S + 4 * USUAL.median_s + USUAL.fetch_s)
