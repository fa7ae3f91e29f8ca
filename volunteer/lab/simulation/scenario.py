"""Scenarios: who takes part, and what goes wrong.

Runs in: simulation.
"""

from __future__ import annotations

from dataclasses import dataclass

from volunteer.lab.simulation.world import USUAL, Net

ROUND_S = 100.0
RUN_ID = "5a" * 32
OLD_LIES = ("vote-anything", "double-commit", "wrong-hash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One kind of run; rates are per member and round."""

    num_members: int
    num_rounds: int = 24
    quiet_rounds: int = 8
    """At the end nothing goes wrong any more, and all are there."""
    ends_when_healed: bool = False
    """Whether the quiet part ends two rounds after everyone has the same head."""
    net: Net = USUAL
    is_open: bool = True
    """Whether the run has no publisher."""
    crash_rate: float = 0.0
    sleep_rate: float = 0.0
    """Crashes that last about 6 rounds."""
    disk_loss_rate: float = 0.0
    """Crashes that leave nothing but the key."""
    freeze_rate: float = 0.0
    """Closed lids: up to 6 rounds in which time stands still, and nothing arrives."""
    clock_jump_rate: float = 0.0
    """The member's clock goes forward by up to 6 rounds, as after a suspend."""
    pause_rate: float = 0.0
    leave_rate: float = 0.0
    """Pauses of 3 to 9 rounds; who pauses says farewell."""
    partition_rate: float = 0.0
    """Of the whole net, for half a round to three rounds."""
    split_rounds: int = 0
    """One long partition in two halves, from round 3 on."""
    num_newcomers: int = 0
    """Of the members, these come later, one every three rounds."""
    num_liars: int = 0
    """Of the members, these break the rules."""
    lies: tuple[str, ...] = OLD_LIES
    """How; see `byzantine.LIES`."""
    lies_per_liar: int = 0
    """How many of these each liar has, drawn; 0: all."""
    speed_range: float = 1.0
    """Fastest against slowest, in tokens/s and in link speed; 1: by 4, and links do not differ."""
    max_contributions: int = 32
    expiry_rounds: int = 8
    quorum: tuple[int, int] = (1, 2)
    grace_s: float = 8.0
    failover_s: float = 20.0
