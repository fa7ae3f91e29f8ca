"""Exactly one state and one reason for every combination, the strongest first."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import msgspec
import pytest

from p2p.swarm_types import PeerVersion
from tests.fakes.members import RUN_ID
from tests.fakes.status_facts import Facts, source
from volunteer.agent import status as status_module
from volunteer.agent.clock import utc_in
from volunteer.agent.exchange import Heard
from volunteer.agent.state_fetch import StateProgress
from volunteer.agent.status import format_left
from volunteer.agent.wire import Heartbeat
from volunteer.answers import PeerStatus, Status
from volunteer.policy.idle import LOOKING, Decision
from volunteer.policy.veto import Cause

OWNER = Decision(
    may_contribute=False,
    cause=Cause.OWNER,
    reason="paused by you",
    resumes_when="you say `allmende resume`",
    resumes_at_s=None,
)
BATTERY = Decision(
    may_contribute=False,
    cause=Cause.BATTERY,
    reason="the machine runs on battery",
    resumes_when="it is on mains power",
    resumes_at_s=None,
)


ORDER: list[tuple[dict[str, Any], str, str]] = [
    (
        {"is_restarting": True, "is_stopping": True},
        "starting",
        "The agent begins anew, without loss: its memory had grown (`agent_memory_limit_bytes`).",
    ),
    ({"is_stopping": True}, "stopped", "The agent is ending."),
    (
        {"has_alarm": True},
        "waiting",
        "A confirmed round was contradicted: training stopped, to apply no wrong update.",
    ),
    ({"decision": OWNER}, "paused", "paused by you"),
    (
        {"is_trainer_frozen": True},
        "waiting",
        "The trainer was stopped by a signal from outside.",
    ),
    (
        {"is_trainer_stuck": True},
        "waiting",
        "The trainer was killed and does not end: its device's driver may hang.",
    ),
    ({"problem": "the device is full"}, "waiting", "The device is full."),
    (
        {"is_aggregator_broken": True},
        "waiting",
        "The aggregator keeps crashing and is in quarantine: its log says why.",
    ),
    ({"storage_problem": "no space left"}, "waiting", "no space left."),
    ({"genesis_problem": "other hash"}, "waiting", "Round 0 cannot be built: other hash."),
    ({"is_catching_up": True}, "catching_up", "The swarm is ahead: fetching what it agreed on."),
    ({"is_training": False}, "starting", "The trainer is loading the model."),
]
"""What holds, and the state and reason that it leads to if nothing above it holds."""


@pytest.mark.parametrize("chosen", itertools.product([False, True], repeat=len(ORDER)))
def test_the_strongest_reason_is_the_state(chosen: tuple[bool, ...]) -> None:
    holding = [row for row, is_on in zip(ORDER, chosen, strict=True) if is_on]
    changes: dict[str, Any] = {}
    for row, _, _ in holding:
        changes |= row
    state, reason, resumes_when = source(Facts(**changes)).state()
    if holding:
        assert (state, reason) == holding[0][1:]
        assert resumes_when
    else:
        assert state == "contributing"
        assert reason
        assert not resumes_when


GIVEN = {"has_tip": False, "is_genesis_given": True}
LOOKED_FOR = StateProgress(
    round_index=0, held_bytes=0, total_bytes=10, bytes_per_s=0.0, num_peers=0, is_complete=False
)
HERE = dataclasses.replace(LOOKED_FOR, held_bytes=10, is_complete=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trainer_pid": None}, "Starting the trainer and the aggregator."),
        ({"aggregator_pid": None}, "Starting the trainer and the aggregator."),
        ({"has_tip": False}, "Building the weights of round 0."),
        (GIVEN, status_module._GIVEN_NOWHERE),
        ({**GIVEN, "is_alone": True}, status_module._GIVEN_ALONE),
        ({**GIVEN, "progress": LOOKED_FOR}, "Looking for who has the shared weights of round 0."),
        ({**GIVEN, "is_alone": True, "progress": LOOKED_FOR}, status_module._GIVEN_ALONE),
        (
            {**GIVEN, "is_alone": True, "progress": HERE},
            "Checking the shared weights of round 0.",
        ),
        (
            {"is_trainer_preparing": True},
            "The trainer prepares the run's texts: once, for large files in hours.",
        ),
        ({}, "The trainer is loading the model."),
    ],
)
def test_starting_says_what_is_being_waited_for(changes: dict[str, Any], reason: str) -> None:
    assert source(Facts(is_training=False, **changes)).state()[:2] == ("starting", reason)


def test_a_child_that_rests_says_when_it_is_tried_again() -> None:
    resting = source(Facts(problem="it crashed", tried_in_s=3480.0))
    state, _, resumes_when = resting.state()
    assert resumes_when == "it is started again (58 min left)"
    assert resting._next_start_utc(state) > utc_in(3400.0)
    assert resting._next_start_utc(state) < utc_in(3600.0)


def test_before_the_sensors_have_told_it_is_starting() -> None:
    state, reason, _ = source(Facts(decision=LOOKING)).state()
    assert (state, reason) == ("starting", "looking whether the machine is in use")


def test_contributing_says_whether_anybody_was_asked() -> None:
    assert "nobody uses this machine" in source(Facts()).state()[1]
    assert "--ignore-idle" in source(Facts(is_idle_ignored=True)).state()[1]


def test_the_next_possible_start_is_told_where_it_can_be_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(status_module, "now_s", lambda: 1000.0)
    monkeypatch.setattr(status_module, "utc_in", lambda seconds: f"in {seconds:g} s")
    waiting = dataclasses.replace(OWNER, next_start_s=1900.0)
    assert source(Facts(decision=waiting)).status().resumes_at_utc == "in 900 s"
    assert source(Facts(decision=OWNER)).status().resumes_at_utc == ""
    assert source(Facts()).status().resumes_at_utc == ""


def progress(**changes: Any) -> StateProgress:
    whole: dict[str, Any] = {
        "round_index": 12,
        "held_bytes": 312_000_000,
        "total_bytes": 824_000_000,
        "bytes_per_s": 9_800_000.0,
        "num_peers": 3,
        "is_complete": False,
    }
    return StateProgress(**(whole | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {},
            "Fetching the shared weights of round 12: 312 of 824 MB (37 %), 9.8 MB/s from 3 peers, "
            "about 52 s left.",
        ),
        (
            {"num_peers": 1, "bytes_per_s": 500_000.0},
            "Fetching the shared weights of round 12: 312 of 824 MB (37 %), 0.5 MB/s from 1 peer, "
            "about 17 min left.",
        ),
        (
            {"num_peers": 0},
            "Fetching the shared weights of round 12: 312 of 824 MB (37 %); nobody gives more of "
            "them just now.",
        ),
        (
            {"num_peers": 0, "held_bytes": 0},
            "Looking for who has the shared weights of round 12.",
        ),
        (
            {"is_complete": True, "held_bytes": 824_000_000},
            "Checking the shared weights of round 12.",
        ),
    ],
)
def test_catching_up_says_how_far_it_is(changes: dict[str, Any], reason: str) -> None:
    told = progress(**changes)
    at_work = source(Facts(is_catching_up=True, progress=told))
    assert at_work.state()[:2] == ("catching_up", reason)
    catch_up = at_work.status().catch_up
    assert catch_up is not None
    assert (catch_up.held_bytes, catch_up.total_bytes) == (told.held_bytes, told.total_bytes)
    assert source(Facts(is_catching_up=True)).status().catch_up is None


def test_a_sensor_makes_it_wait_and_the_owner_makes_it_pause() -> None:
    assert source(Facts(decision=BATTERY)).state() == (
        "waiting",
        "the machine runs on battery",
        "it is on mains power",
    )


def heard(tokens_per_s: float) -> Heard:
    heartbeat = Heartbeat(
        run_id=RUN_ID,
        module_id="dense",
        tip=RUN_ID,
        round_index=5,
        state_hash="ab" * 32,
        is_contributing=True,
        tokens_per_s=tokens_per_s,
        loss=None,
        addrs=(),
    )
    return Heard(heartbeat, 0.0)


def test_the_whole_status_is_json_that_is_read_back() -> None:
    facts = Facts(heard={"other": heard(30.0), "third": heard(2.0)})
    status = source(facts).status()
    assert status.swarm_tokens_per_s == 42.0
    assert (status.num_peers, status.peer_id) == (1, "me")
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status
    alarmed = source(Facts(has_alarm=True)).status()
    assert "final" in alarmed.alarm
    assert source(Facts(has_tip=False)).status().round_elapsed_s == 0.0


def test_peers_are_the_connected_ones_with_what_they_said() -> None:
    quiet = source(Facts()).peers()
    assert [(p.peer_id, p.round_index, p.last_heard_s) for p in quiet] == [("other", None, None)]
    told = source(Facts(heard={"other": heard(30.0), "gone": heard(1.0)})).peers()
    assert [(p.peer_id, p.round_index, p.tokens_per_s) for p in told] == [("other", 5, 30.0)]
    assert told[0].rtt_ms == pytest.approx(10.0)
    assert isinstance(told[0], PeerStatus)


def test_the_status_counts_who_of_the_run_speaks_another_protocol() -> None:
    alone = source(Facts()).status()
    assert (alone.protocol, alone.differing_peers) == ("1.0", {})
    differing = {
        "a": PeerVersion(2, 0, "new"),
        "b": PeerVersion(2, 3, ""),
        "c": PeerVersion(3, 0, ""),
    }
    status = source(Facts(differing=differing)).status()
    assert status.differing_peers == {"2": 2, "3": 1}
    told = msgspec.convert(msgspec.json.decode(msgspec.json.encode(status)), Status)
    assert told == status, "as the control socket gives it"


def test_a_timed_pause_says_how_long_it_lasts() -> None:
    texts = [(59.0, "59 s"), (60.0, "1 min"), (3599.0, "1 h 00 min"), (7080.0, "1 h 58 min")]
    assert [format_left(seconds) for seconds, _ in texts] == [text for _, text in texts]


def test_the_status_tells_the_months_bytes_and_the_memory() -> None:
    status = source(Facts()).status()
    assert (status.data_used_bytes, status.data_budget_bytes) == (4_000_000, 5_000_000)
    assert status.is_online
    assert status.memory_note == "412 MB"
    assert not status.is_restarting
    assert source(Facts(is_restarting=True)).status().is_restarting
