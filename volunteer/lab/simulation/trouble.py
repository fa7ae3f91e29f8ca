"""What goes wrong, drawn once a round for every member.

Runs in: simulation. Rounds stand for real ones of 600 s, so an hour is 6 of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

from volunteer.lab.simulation.member import Member
from volunteer.lab.simulation.scenario import ROUND_S, Scenario
from volunteer.lab.simulation.world import World

HOUR_ROUNDS = 6.0
CRASH_S = 30.0
"""Mean time until somebody who crashed is back."""


class Trouble:
    """The faults of one scenario, until it is quiet."""

    def __init__(
        self, scenario: Scenario, world: World, members: Mapping[str, Member], rng: random.Random
    ) -> None:
        """Draw from `rng`; `begin_round` is called once a round."""
        self._scenario = scenario
        self._world = world
        self._members = members
        self._rng = rng
        self.is_quiet = False

    def begin_round(self) -> None:
        """Draw what goes wrong in this round."""
        if self.is_quiet:
            return
        scenario, rng = self._scenario, self._rng
        if scenario.net.most_blocked:
            self._world.redraw_blocked(list(self._members))
        if rng.random() < scenario.partition_rate:
            self._split(rng.uniform(0.5, 3.0) * ROUND_S)
        for member in self._members.values():
            for rate, cause in self._faults():
                if rate and rng.random() < rate:
                    self._world.after(rng.uniform(0, ROUND_S), partial(cause, member))
            if member.liar is not None:
                self._world.after(rng.uniform(0, ROUND_S), member.liar.make_mischief)

    def _faults(self) -> tuple[tuple[float, Callable[[Member], None]], ...]:
        scenario = self._scenario
        return (
            (scenario.crash_rate, self._crash),
            (scenario.sleep_rate, self._sleep),
            (scenario.disk_loss_rate, self._lose_disk),
            (scenario.freeze_rate, self._freeze),
            (scenario.clock_jump_rate, self._jump),
            (scenario.pause_rate, self._pause),
            (scenario.leave_rate, self._leave),
        )

    def split_for_long(self) -> None:
        """Cut the net into two halves for `split_rounds`."""
        half = len(self._members) // 2
        self._world.partition = {name: i // half for i, name in enumerate(self._members)}
        self._world.after(self._scenario.split_rounds * ROUND_S, self._world.partition.clear)

    def end(self) -> None:
        """Nothing goes wrong any more, and all are there."""
        self.is_quiet = True
        self._world.blocked.clear()
        self._world.partition.clear()
        for member in self._members.values():
            member.thaw()
            self._restart(member)
            member.resume()

    # -------------------------------------------------------------------------- one by one

    def _split(self, for_s: float) -> None:
        self._world.partition = {name: self._rng.randrange(2) for name in self._members}
        self._world.after(for_s, self._world.partition.clear)

    def _crash(self, member: Member) -> None:
        self._end_for(member, self._rng.expovariate(1 / CRASH_S))

    def _sleep(self, member: Member) -> None:
        self._end_for(member, self._rng.expovariate(1 / (HOUR_ROUNDS * ROUND_S)))

    def _end_for(self, member: Member, for_s: float) -> None:
        if member.is_reachable and not self.is_quiet:
            member.crash()
            self._world.after(for_s, partial(self._restart, member))

    def _lose_disk(self, member: Member) -> None:
        if member.is_reachable and not self.is_quiet:
            member.lose_disk()
            for_s = self._rng.expovariate(1 / CRASH_S)
            self._world.after(for_s, partial(self._restart, member))

    def _restart(self, member: Member) -> None:
        if not member.is_up:
            member.start()

    def _freeze(self, member: Member) -> None:
        if member.is_reachable and not self.is_quiet:
            member.freeze()
            for_s = self._rng.uniform(0.1, 1.0) * HOUR_ROUNDS * ROUND_S
            self._world.after(for_s, member.thaw)

    def _jump(self, member: Member) -> None:
        if not self.is_quiet:
            member.clock_ahead_s += self._rng.uniform(0.0, HOUR_ROUNDS * ROUND_S)

    def _pause(self, member: Member) -> None:
        self._pause_for(member, self._rng.uniform(0.2, 4.0))

    def _leave(self, member: Member) -> None:
        self._pause_for(member, self._rng.uniform(3.0, 9.0))

    def _pause_for(self, member: Member, for_rounds: float) -> None:
        if not self.is_quiet and not member.is_frozen:
            member.pause()
            self._world.after(for_rounds * ROUND_S, member.resume)
