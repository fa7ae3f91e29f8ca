"""What a status is made of, and a `StatusSource` over twins of the agent's parts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from p2p.swarm_types import PeerVersion
from tests.fakes.members import rules
from tests.fakes.network import FakeNetwork
from volunteer.agent.data_budget import DataUse
from volunteer.agent.exchange import Heard
from volunteer.agent.handover import Handover
from volunteer.agent.state_fetch import StateProgress
from volunteer.agent.status import StatusSource
from volunteer.agent.trainer_service import TrainerView
from volunteer.data.builtin import load_builtin_run
from volunteer.messages import StateEvaluated
from volunteer.policy.idle import CONTRIBUTE, Decision
from volunteer.policy.veto import Cause
from volunteer.rounds.machine import Machine
from volunteer.rounds.turn import Timing


@dataclass
class Facts:
    """What a status is made of."""

    is_stopping: bool = False
    has_alarm: bool = False
    decision: Decision = CONTRIBUTE
    is_trainer_frozen: bool = False
    is_trainer_stuck: bool = False
    is_trainer_preparing: bool = False
    problem: str = ""
    tried_in_s: float | None = None
    is_aggregator_broken: bool = False
    storage_problem: str = ""
    genesis_problem: str = ""
    is_genesis_given: bool = False
    is_alone: bool = False
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
    its_rules = dataclasses.replace(rules(), is_genesis_given=facts.is_genesis_given)
    machine = Machine(its_rules, Timing(round_s=8, grace_s=1, failover_s=2), "me")
    machine.tip = rules().genesis_id if facts.has_tip else None
    machine.alarm = ("final", "other") if facts.has_alarm else None
    network = FakeNetwork()
    if not facts.is_alone:
        network.join("other")
    network.join("me").differing = facts.differing
    parts = SimpleNamespace(
        driver=SimpleNamespace(
            machine=machine,
            storage_problem=facts.storage_problem,
            files=SimpleNamespace(genesis_problem=facts.genesis_problem),
            is_catching_up=facts.is_catching_up,
            state_progress=facts.progress,
            state_hash="5a" * 32,
            held_out=StateEvaluated(
                request_id=1, state_hash="", held_out_loss=1.5, loss_stderr=0.1, num_windows=64
            ),
        ),
        exchange=SimpleNamespace(members=lambda: facts.heard),
        trainer=_trainer(facts),
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


def _trainer(facts: Facts) -> SimpleNamespace:
    return SimpleNamespace(
        view=TrainerView(
            problem=facts.problem,
            resumes_when="it is started again" if facts.problem else "",
            tokens_per_s=10.0,
        ),
        pid=facts.trainer_pid,
        is_frozen=facts.is_trainer_frozen,
        is_stuck=facts.is_trainer_stuck,
        is_preparing=facts.is_trainer_preparing,
        tried_in_s=facts.tried_in_s,
    )
