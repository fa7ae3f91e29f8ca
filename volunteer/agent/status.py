"""What the agent says about itself: one state, one reason, what ends it.

Runs in: agent. Everything shown is read from where it is decided; nothing is kept twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from p2p.swarm import Swarm
from volunteer.agent.aggregator_service import AggregatorService
from volunteer.agent.bookkeeper import Bookkeeper
from volunteer.agent.clock import now_s, now_utc, utc_in
from volunteer.agent.driver import RoundDriver
from volunteer.agent.exchange import Exchange
from volunteer.agent.handover import Handover
from volunteer.agent.policy_task import PolicyTask
from volunteer.agent.state_fetch import StateProgress
from volunteer.agent.traffic import TrafficMeter
from volunteer.agent.trainer_service import TRIED_AGAIN, TrainerService
from volunteer.answers import CatchUp, PeerStatus, Stats, Status
from volunteer.policy.idle import Decision
from volunteer.policy.veto import Cause
from volunteer.rounds.silence import ALONE_ROUNDS, LISTEN_ROUNDS
from volunteer.run import RunSpec

_BEGINS_ANEW = (
    "The agent begins anew, without loss: its memory had grown (`agent_memory_limit_bytes`)."
)
_CONTRIBUTING = "Nothing stands against it: nobody uses this machine, and nothing else does."
_SILENT = (
    "What this volunteer may have signed in this run is not on its disk: it trains, and signs "
    "nothing until that cannot be signed twice."
)
_SILENT_ENDS = (
    f"it has listened to the others for {LISTEN_ROUNDS:g} rounds, or to nobody for {ALONE_ROUNDS:g}"
)
_GIVEN_ALONE = (
    "The run begins from weights that are not on this machine, and no other member is connected to "
    "have them from: `allmende start --bootstrap` takes the address of one."
)
_GIVEN_NOWHERE = (
    "Nobody who is connected gives the weights that the run begins from: they are asked again."
)
_REGARDLESS = "Whatever the idle policy says (`--ignore-idle`)."


def format_left(left_s: float) -> str:
    """Return a duration as `3 d 04 h`, `1 h 58 min`, `12 min` or `45 s`."""
    minutes = round(left_s / 60)
    if left_s < 60:
        return f"{left_s:.0f} s"
    if minutes >= 2 * 24 * 60:
        return f"{minutes // 1440} d {minutes // 60 % 24:02d} h"
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"


def describe_progress(progress: StateProgress) -> str:
    """Return how far the fetch of a state is, as a sentence."""
    what = f"the shared weights of round {progress.round_index}"
    if progress.is_complete:
        return f"Checking {what}."
    if not progress.held_bytes and not progress.num_peers:
        return f"Looking for who has {what}."
    percent = 100 * progress.held_bytes // max(1, progress.total_bytes)
    told = (
        f"Fetching {what}: {progress.held_bytes / 1e6:.0f} of {progress.total_bytes / 1e6:.0f} MB "
        f"({percent} %)"
    )
    if not progress.num_peers or progress.bytes_per_s < 1.0:
        return f"{told}; nobody gives more of them just now."
    left_s = (progress.total_bytes - progress.held_bytes) / progress.bytes_per_s
    peers = "1 peer" if progress.num_peers == 1 else f"{progress.num_peers} peers"
    return (
        f"{told}, {progress.bytes_per_s / 1e6:.1f} MB/s from {peers}, "
        f"about {format_left(left_s)} left."
    )


def _catch_up(progress: StateProgress | None) -> CatchUp | None:
    if progress is None:
        return None
    return CatchUp(
        round_index=progress.round_index,
        held_bytes=progress.held_bytes,
        total_bytes=progress.total_bytes,
        bytes_per_s=progress.bytes_per_s,
        num_peers=progress.num_peers,
    )


@dataclass(slots=True, kw_only=True)
class StatusSource:
    """Where the answers come from."""

    spec: RunSpec
    swarm: Swarm
    driver: RoundDriver
    exchange: Exchange
    trainer: TrainerService
    aggregator: AggregatorService
    policy: PolicyTask
    keeper: Bookkeeper
    traffic: TrafficMeter
    is_stopping: bool = False
    handover: Handover = field(default_factory=Handover)
    """Whether the agent begins anew in its own place."""
    memory_note: Callable[[], str] = lambda: ""
    """Says what is not done about too much memory."""
    data_note: Callable[[], str] = lambda: ""
    """Says what of the run's data is left out here."""

    def state(self) -> tuple[str, str, str]:
        """Return (state, reason, what ends it)."""
        if self.handover.is_wanted:
            return "starting", _BEGINS_ANEW, "it is back, in some seconds"
        if self.is_stopping:
            return "stopped", "The agent is ending.", "you start it again"
        if self.driver.machine.alarm is not None:
            return (
                "waiting",
                "A confirmed round was contradicted: training stopped, to apply no wrong update.",
                "you report it with the log, and join anew",
            )
        decision = self.policy.decision
        if not decision.may_contribute:
            state = "paused" if self.policy.is_paused_by_owner else "waiting"
            state = "starting" if decision.cause is Cause.LOOKING else state
            return state, decision.reason, self._with_time_left(decision)
        trouble = self._trouble()
        if trouble is not None:
            return "waiting", *trouble
        if self.driver.is_catching_up:
            return "catching_up", self._what_is_fetched(), "it is here"
        if not self.policy.is_training:
            return "starting", self._what_is_starting(), "the first step is taken"
        return "contributing", _REGARDLESS if self.policy.is_idle_ignored else _CONTRIBUTING, ""

    def _trouble(self) -> tuple[str, str] | None:
        """Return what has gone wrong with a part of the program, and what ends it."""
        view = self.trainer.view
        if self.trainer.is_frozen or self.aggregator.is_frozen:
            who = "trainer" if self.trainer.is_frozen else "aggregator"
            return f"The {who} was stopped by a signal from outside.", "it is woken"
        if self.trainer.is_stuck:
            reason = "The trainer was killed and does not end: its device's driver may hang."
            return reason, "it has ended; restarting the machine ends it for certain"
        if view.problem:
            problem = view.problem[0].upper() + view.problem[1:]
            return f"{problem}.", self._with_left(view.resumes_when, self._tried_in_s())
        if self.aggregator.is_broken:
            reason = "The aggregator keeps crashing and is in quarantine: its log says why."
            return reason, self._with_left(TRIED_AGAIN, self._tried_in_s())
        if self.driver.storage_problem:
            return f"{self.driver.storage_problem}.", "the disk can be written to again"
        if self.driver.files.genesis_problem:
            problem = self.driver.files.genesis_problem
            what = "begun from" if self.spec.genesis.is_given else "built"
            reason = f"Round 0 cannot be {what}: {problem}."
            return reason, "that is mended: it is tried again by itself"
        if self.driver.machine.is_silent:
            return _SILENT, _SILENT_ENDS
        return None

    def _what_is_fetched(self) -> str:
        progress = self.driver.state_progress
        if progress is None:
            return "The swarm is ahead: fetching what it agreed on."
        return describe_progress(progress)

    def _tried_in_s(self) -> float | None:
        """Return when what went wrong with a child is tried again by itself."""
        waits = (self.trainer.tried_in_s, self.aggregator.tried_in_s)
        return max((wait_s for wait_s in waits if wait_s is not None), default=None)

    def _with_time_left(self, decision: Decision) -> str:
        if decision.resumes_at_s is None:
            return decision.resumes_when
        return self._with_left(decision.resumes_when, decision.resumes_at_s - now_s())

    def _with_left(self, resumes_when: str, left_s: float | None) -> str:
        if left_s is None:
            return resumes_when
        return f"{resumes_when} ({format_left(max(0.0, left_s))} left)"

    def _next_start_utc(self, state: str) -> str:
        next_start_s = self.policy.decision.next_start_s
        tried_in_s = self._tried_in_s()
        if state == "waiting" and self.policy.decision.may_contribute and tried_in_s is not None:
            return utc_in(tried_in_s)
        if state not in ("paused", "waiting") or next_start_s is None:
            return ""
        return utc_in(max(0.0, next_start_s - now_s()))

    def _what_is_starting(self) -> str:
        if self.aggregator.pid is None or self.trainer.pid is None:
            return "Starting the trainer and the aggregator."
        if self.driver.machine.tip is None:
            return self._what_is_begun_from()
        if self.trainer.is_preparing:
            return "The trainer prepares the run's texts: once, for large files in hours."
        return "The trainer is loading the model."

    def _what_is_begun_from(self) -> str:
        if not self.driver.machine.rules.is_genesis_given:
            return "Building the weights of round 0."
        progress = self.driver.state_progress
        if not self.swarm.peers() and not (progress and progress.is_complete):
            return _GIVEN_ALONE
        return _GIVEN_NOWHERE if progress is None else describe_progress(progress)

    def status(self) -> Status:
        """Return the whole status."""
        state, reason, resumes_when = self.state()
        machine, view = self.driver.machine, self.trainer.view
        facts = machine.known.facts[machine.tip or machine.rules.genesis_id]
        confirmed_at_s = self.keeper.last_confirmed_at_s
        others = sum(h.heartbeat.tokens_per_s for h in self.exchange.members().values())
        held_out = self.driver.held_out
        return Status(
            state=state,
            reason=reason,
            resumes_when=resumes_when,
            resumes_at_utc=self._next_start_utc(state),
            run_id=self.spec.run_id,
            run_name=self.spec.name,
            round_index=facts.height,
            inner_step=view.inner_step,
            state_hash=self.driver.state_hash,
            tip=facts.commit_id,
            held_out_loss=held_out.held_out_loss if held_out else None,
            held_out_stderr=held_out.loss_stderr if held_out else None,
            held_out_windows=held_out.num_windows if held_out else None,
            bytes_per_token=self._bytes_per_token(),
            train_loss=view.loss,
            tokens_per_s=view.tokens_per_s,
            num_peers=len(self.swarm.peers()),
            peer_id=self.swarm.peer_id,
            listen_addrs=self.swarm.listen_addrs,
            agent_pid=os.getpid(),
            trainer_pid=self.trainer.pid,
            aggregator_pid=self.aggregator.pid,
            device=view.device_name,
            micro_batch=view.micro_batch,
            last_confirmed_s=None if confirmed_at_s is None else now_s() - confirmed_at_s,
            round_elapsed_s=now_s() - machine.applied_at_s if machine.tip else 0.0,
            round_s=self.spec.rounds.round_s,
            grace_s=machine.timing.grace_s,
            failover_s=machine.timing.failover_s,
            final_round_index=machine.known.facts[machine.final_id].height,
            swarm_tokens_per_s=view.tokens_per_s + others,
            tokens_done=self.keeper.tokens_elsewhere + view.tokens_total,
            tokens_confirmed=self.keeper.tokens_confirmed,
            tokens_since_contribution=view.tokens_since_contribution,
            bytes_by_purpose=self.traffic.by_purpose(),
            data_used_bytes=self.policy.read_data().used_bytes,
            data_budget_bytes=self.policy.wishes.monthly_data_budget_bytes,
            is_online=self.swarm.is_online,
            is_restarting=self.handover.is_wanted,
            memory_note=self.memory_note(),
            data_note=self.data_note(),
            protocol="{}.{}".format(*self.swarm.protocol),
            differing_peers=self._differing_peers(),
            release=self.policy.release,
            finishes_round=self.policy.word.finishes_round,
            stops_then=self.policy.word.ends_agent,
            network_held=self.policy.decision.network_reason,
            catch_up=_catch_up(self.driver.state_progress),
            excluded_until_round=facts.strikes.last_excluded(machine.me, facts.height + 1),
            alarm="" if machine.alarm is None else f"final {machine.alarm[0]} was contradicted",
        )

    def _bytes_per_token(self) -> float | None:
        if self.spec.data.tokenizer == "bytes":
            return 1.0
        held_out = self.driver.held_out
        return held_out.bytes_per_token if held_out else None

    def _differing_peers(self) -> dict[str, int]:
        versions = self.swarm.differing_peers().values()
        counts = Counter(version.major for version in versions)
        return {str(major): counts[major] for major in sorted(counts)}

    def with_steps_since_snapshot(self, kept: Stats) -> Stats:
        """Return the ledger's figures with what the trainer has done since its last snapshot."""
        view, keeper = self.trainer.view, self.keeper
        tokens = max(0, keeper.tokens_elsewhere + view.tokens_total - kept.tokens_done)
        steps = max(0, keeper.steps_elsewhere + view.inner_step - kept.inner_steps)
        return msgspec.structs.replace(
            kept,
            tokens_done=kept.tokens_done + tokens,
            tokens_pending=kept.tokens_pending + tokens,
            inner_steps=kept.inner_steps + steps,
            done_as_of_utc=now_utc() if tokens else kept.done_as_of_utc,
        )

    def peers(self) -> list[PeerStatus]:
        """Return the connected peers, with what their last heartbeat said."""
        members = self.exchange.members()
        machine = self.driver.machine
        final = machine.known.facts[machine.final_id]
        tip = machine.known.facts[machine.tip or machine.final_id]
        listed = []
        for peer in self.swarm.peers():
            heard = members.get(peer.peer_id)
            beat = heard.heartbeat if heard is not None else None
            version = peer.version
            listed.append(
                PeerStatus(
                    peer_id=peer.peer_id,
                    addr=peer.addr,
                    direction=peer.direction,
                    rtt_ms=None if peer.rtt_s is None else 1000.0 * peer.rtt_s,
                    connected_s=peer.connected_s,
                    round_index=beat.round_index if beat else None,
                    tokens_per_s=beat.tokens_per_s if beat else None,
                    state_hash=beat.state_hash if beat else None,
                    last_heard_s=now_s() - heard.at_s if heard else None,
                    is_relayed=peer.is_relayed,
                    last_final_round=final.seen.get(peer.peer_id),
                    excluded_until_round=tip.strikes.last_excluded(peer.peer_id, tip.height + 1),
                    protocol=f"{version.major}.{version.minor}" if version else None,
                    program=version.program if version else None,
                )
            )
        return listed
