"""Exactly one state and one reason for every combination, the strongest first; and the verbs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import trio

from p2p.swarm_types import PeerVersion
from tests.fakes.members import RUN_ID, rules
from tests.fakes.network import FakeNetwork
from volunteer.agent import status as status_module
from volunteer.agent.clock import utc_in
from volunteer.agent.data_budget import DataUse
from volunteer.agent.exchange import Heard
from volunteer.agent.handover import Handover
from volunteer.agent.state_fetch import StateProgress
from volunteer.agent.status import StatusSource, format_left
from volunteer.agent.trainer_service import TrainerView
from volunteer.agent.verbs import MAX_CONTRIBUTIONS, MAX_HISTORY, MAX_PAUSE_S, make_verbs
from volunteer.agent.wire import Heartbeat
from volunteer.answers import ContributionPoint, PeerStatus, Release, RoundPoint, Stats, Status
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import ControlError
from volunteer.policy.idle import CONTRIBUTE, LOOKING, Decision
from volunteer.policy.veto import Cause
from volunteer.rounds.machine import Machine
from volunteer.rounds.turn import Timing

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


@dataclass
class Facts:
    """What a status is made of."""

    is_stopping: bool = False
    has_alarm: bool = False
    decision: Decision = CONTRIBUTE
    is_trainer_frozen: bool = False
    is_trainer_stuck: bool = False
    problem: str = ""
    tried_in_s: float | None = None
    is_aggregator_broken: bool = False
    storage_problem: str = ""
    is_catching_up: bool = False
    is_training: bool = True
    trainer_pid: int | None = 11
    aggregator_pid: int | None = 12
    has_tip: bool = True
    is_idle_ignored: bool = False
    progress: StateProgress | None = None
    heard: dict[str, Heard] = field(default_factory=dict)
    differing: dict[str, PeerVersion] = field(default_factory=dict)
    is_restarting: bool = False


def source(facts: Facts) -> StatusSource:
    machine = Machine(rules(), Timing(round_s=8, grace_s=1, failover_s=2), "me")
    machine.tip = rules().genesis_id if facts.has_tip else None
    machine.alarm = ("final", "other") if facts.has_alarm else None
    network = FakeNetwork()
    network.join("other")
    network.join("me").differing = facts.differing
    parts = SimpleNamespace(
        driver=SimpleNamespace(
            machine=machine,
            storage_problem=facts.storage_problem,
            is_catching_up=facts.is_catching_up,
            state_progress=facts.progress,
            state_hash="5a" * 32,
            held_out_loss=1.5,
        ),
        exchange=SimpleNamespace(members=lambda: facts.heard),
        trainer=SimpleNamespace(
            view=TrainerView(
                problem=facts.problem,
                resumes_when="it is started again" if facts.problem else "",
                tokens_per_s=10.0,
            ),
            pid=facts.trainer_pid,
            is_frozen=facts.is_trainer_frozen,
            is_stuck=facts.is_trainer_stuck,
            tried_in_s=facts.tried_in_s,
        ),
        aggregator=SimpleNamespace(
            is_broken=facts.is_aggregator_broken,
            pid=facts.aggregator_pid,
            is_frozen=False,
            tried_in_s=None,
        ),
        policy=SimpleNamespace(
            decision=facts.decision,
            is_training=facts.is_training,
            release=None,
            word=SimpleNamespace(finishes_round=None, ends_agent=False),
            is_paused_by_owner=facts.decision.cause is Cause.OWNER,
            is_idle_ignored=facts.is_idle_ignored,
            read_data=lambda: DataUse(used_bytes=4_000_000),
            wishes=SimpleNamespace(monthly_data_budget_bytes=5_000_000),
        ),
        keeper=SimpleNamespace(last_confirmed_at_s=None, tokens_confirmed=7, tokens_elsewhere=0),
        traffic=SimpleNamespace(by_purpose=lambda: {"sync": {"sent": 3, "received": 4}}),
    )
    handover = Handover()
    if facts.is_restarting:
        handover.want(1.0, 400_000_000)
    return StatusSource(
        spec=load_builtin_run("demo"),
        handover=handover,
        memory_note=lambda: "412 MB",
        swarm=network.swarms["me"].as_swarm,
        is_stopping=facts.is_stopping,
        **{name: cast("Any", part) for name, part in vars(parts).items()},
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trainer_pid": None}, "Starting the trainer and the aggregator."),
        ({"aggregator_pid": None}, "Starting the trainer and the aggregator."),
        ({"has_tip": False}, "Building the weights of round 0."),
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


# ------------------------------------------------------------------------------------ verbs


class Asked:
    """Records what the verbs ask of the agent's parts."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.source = source(Facts())

    async def pause(self, for_s: float | None) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("pause", for_s))

    async def resume(self) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("resume",))

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("flush",))

    def stats(self, since_utc: str | None) -> Stats:
        return Stats(tokens_done=5)

    def history(self, run_id: str, module_id: str, limit: int) -> tuple[RoundPoint, ...]:
        self.calls.append(("history", run_id, module_id, limit))
        return ()

    def contributions(
        self, run_id: str, module_id: str, limit: int
    ) -> tuple[ContributionPoint, ...]:
        self.calls.append(("contributions", run_id, module_id, limit))
        return ()

    release: Release | None = None
    is_running = True

    async def finish(self, *, ends_agent: bool = False) -> None:
        await trio.lowlevel.checkpoint()
        self.calls.append(("finish", ends_agent))

    def call(self, verb: str, args: Mapping[str, Any]) -> object:
        policy = SimpleNamespace(
            pause=self.pause,
            finish=self.finish,
            resume=self.resume,
            flush=lambda: self.calls.append(("count",)),
            release=self.release,
            is_running=self.is_running,
        )
        self.source.keeper = cast(
            "Any",
            SimpleNamespace(
                flush=self.flush,
                with_listing=list,
                last_confirmed_at_s=None,
                tokens_confirmed=0,
                tokens_elsewhere=0,
                steps_elsewhere=0,
            ),
        )
        verbs = make_verbs(
            self.source,
            cast("Any", self),
            cast("Any", policy),
            cast("Any", SimpleNamespace(flush=self.flush)),
            lambda: self.calls.append(("stop",)),
            cast("Any", SimpleNamespace()),
        )
        return trio.run(verbs[verb], args)


def test_the_figures_have_what_was_trained_since_the_last_snapshot() -> None:
    source = Asked().source
    source.keeper = cast("Any", SimpleNamespace(tokens_elsewhere=100, steps_elsewhere=10))
    source.trainer.view.tokens_total, source.trainer.view.inner_step = 50, 5
    kept = Stats(tokens_done=120, tokens_pending=20, tokens_confirmed=100, inner_steps=12)
    stats = source.with_steps_since_snapshot(kept)
    assert (stats.tokens_done, stats.tokens_pending, stats.inner_steps) == (150, 50, 15)
    assert stats.tokens_done == stats.tokens_pending + stats.tokens_confirmed
    source.trainer.view.tokens_total, source.trainer.view.inner_step = 20, 2
    assert source.with_steps_since_snapshot(kept) == kept, "paused: the snapshot has everything"


def test_a_timed_pause_says_how_long_it_lasts() -> None:
    texts = [(59.0, "59 s"), (60.0, "1 min"), (3599.0, "1 h 00 min"), (7080.0, "1 h 58 min")]
    assert [format_left(seconds) for seconds, _ in texts] == [text for _, text in texts]


def test_each_verb_does_its_one_thing() -> None:
    asked = Asked()
    assert isinstance(asked.call("status", {}), Status)
    assert asked.call("peers", {}) == asked.source.peers()
    assert asked.call("stats", {}) == Stats(tokens_done=5)
    assert asked.calls == [("count",), ("flush",), ("flush",)], "what is not written yet counts"
    asked.calls.clear()
    assert isinstance(asked.call("resume", {}), Status)
    assert asked.call("stop", {}) == {"stopping": True}
    assert asked.calls == [("resume",), ("stop",)]


@pytest.mark.parametrize(
    ("args", "for_s"),
    [
        ({}, None),
        ({"for_s": None}, None),
        ({"for_s": 1}, 1.0),
        ({"for_s": MAX_PAUSE_S}, MAX_PAUSE_S),
    ],
)
def test_pausing_takes_seconds_or_nothing(args: dict[str, Any], for_s: float | None) -> None:
    asked = Asked()
    assert isinstance(asked.call("pause", args), Status)
    assert asked.calls == [("pause", for_s)]


def test_finishing_waits_for_the_round_and_stops_at_once_where_there_is_none() -> None:
    asked = Asked()
    asked.call("pause", {"finish": True})
    assert asked.call("stop", {"finish": True}) == {"stopping": False}
    assert asked.calls == [("finish", False), ("finish", True)]
    asked.calls.clear()
    asked.is_running = False
    assert asked.call("stop", {"finish": True}) == {"stopping": True}
    assert asked.calls == [("stop",)]


def test_a_pause_that_leaves_something_is_an_error_that_says_what() -> None:
    asked = Asked()
    asked.release = Release(
        after_s=5.0, num_processes=2, gpu_freed_bytes=None, problem="process 7 cannot be ended"
    )
    with pytest.raises(ControlError, match="process 7 cannot be ended"):
        asked.call("pause", {})
    assert asked.calls == [("pause", None)]


@pytest.mark.parametrize(
    "for_s", [0, 0.5, -1, MAX_PAUSE_S + 1, "10", True, [], {}, float("nan"), float("inf"), 10**30]
)
def test_pausing_for_nonsense_is_refused(for_s: object) -> None:
    asked = Asked()
    with pytest.raises(ControlError, match="for_s"):
        asked.call("pause", {"for_s": for_s})
    assert not asked.calls


@pytest.mark.parametrize(
    ("verb", "most"), [("history", MAX_HISTORY), ("contributions", MAX_CONTRIBUTIONS)]
)
def test_long_lists_have_a_limit(verb: str, most: int) -> None:
    asked = Asked()
    for args in ({}, {"limit": 1}, {"limit": most}):
        asked.call(verb, args)
    calls = [call for call in asked.calls if call[0] == verb]
    assert [call[3] for call in calls] == [200, 1, most]
    assert calls[0][1:3] == (asked.source.spec.run_id, "dense")
    for limit in (0, -5, most + 1, "all", None, 1e300):
        with pytest.raises(ControlError, match="limit"):
            asked.call(verb, {"limit": limit})


def test_the_status_tells_the_months_bytes_and_the_memory() -> None:
    status = source(Facts()).status()
    assert (status.data_used_bytes, status.data_budget_bytes) == (4_000_000, 5_000_000)
    assert status.is_online
    assert status.memory_note == "412 MB"
    assert not status.is_restarting
    assert source(Facts(is_restarting=True)).status().is_restarting
