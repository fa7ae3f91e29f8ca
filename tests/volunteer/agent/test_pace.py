"""How often a member says something while nothing happens."""

from __future__ import annotations

import pytest

from tests.fakes.members import SignedChain, rules
from volunteer.agent.timing import (
    SYNCS_AFTER_MOVE,
    discover_every_s,
    heartbeat_period_s,
    is_settled,
    ping_every_s,
)
from volunteer.rounds.machine import Machine
from volunteer.rounds.turn import Timing


@pytest.mark.parametrize(
    ("round_s", "num_members", "period_s"),
    [
        (600.0, 2, 300.0),
        (600.0, 8, 600.0),
        (600.0, 32, 600.0),
        (600.0, 320, 6000.0),
        (6.0, 2, 3.0),
        (6.0, 3, 4.5),
        (6.0, 4, 6.0),
        (8.0, 30, 29.0),
    ],
)
def test_what_all_say_in_a_round_grows_with_the_blobs(
    round_s: float, num_members: int, period_s: float
) -> None:
    assert heartbeat_period_s(round_s, num_members - 1) == period_s


def test_pings_and_searches_follow_the_round_within_bounds() -> None:
    assert [ping_every_s(round_s) for round_s in (6, 300, 600, 86400)] == [5, 10, 20, 20]
    assert [discover_every_s(round_s) for round_s in (6, 300, 600, 86400)] == [60, 300, 600, 600]


def test_a_member_is_settled_while_nobody_waits_for_anything() -> None:
    chain = SignedChain()
    tip = chain.grow(chain.genesis, 2)
    machine = Machine(rules(), Timing(round_s=600, grace_s=30, failover_s=30), "me")
    assert not is_settled(machine, 1e6, sync_s=18.0), "it stands nowhere yet"
    machine.tip = chain.genesis
    machine.applied_at_s = 1000.0
    assert not is_settled(machine, 1000.0 + SYNCS_AFTER_MOVE * 18.0, sync_s=18.0)
    later_s = 1001.0 + SYNCS_AFTER_MOVE * 18.0
    assert is_settled(machine, later_s, sync_s=18.0)
    machine.closed_at_s = later_s
    assert not is_settled(machine, later_s, sync_s=18.0), "a commit is to come"
    machine.closed_at_s = None
    commit = chain.builder.records[tip]
    machine.known.add(tip, commit)
    assert not is_settled(machine, later_s, sync_s=18.0), "what it is made of is missing"
    for record_id, record in chain.builder.records.items():
        machine.known.add(record_id, record)
    assert not is_settled(machine, later_s, sync_s=18.0), "there is a higher commit"
    machine.tip = tip
    assert is_settled(machine, later_s, sync_s=18.0)
