"""The control verb `doctor`: what only the agent knows of itself.

Runs in: agent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from p2p.swarm import Swarm
from volunteer.agent.control import Verb
from volunteer.agent.policy_task import PolicyTask
from volunteer.agent.status import StatusSource
from volunteer.doctor.facts import AgentFacts, PeerClock, SourceLine


def make_doctor(source: StatusSource, policy: PolicyTask) -> Verb:
    """Return the verb; with `{"clocks": true}` it compares clocks first, which takes up to 10 s."""

    async def doctor(args: Mapping[str, Any]) -> object:
        clocks = await _clocks(source.swarm) if args.get("clocks") is True else ()
        return agent_facts(source, policy, clocks)

    return doctor


async def _clocks(swarm: Swarm) -> tuple[PeerClock, ...]:
    return tuple(
        PeerClock(peer_id=view.peer_id, ahead_s=view.ahead_s, error_s=view.error_s)
        for view in await swarm.compare_clocks()
    )


def agent_facts(
    source: StatusSource, policy: PolicyTask, clocks: tuple[PeerClock, ...]
) -> AgentFacts:
    """Return the facts of this moment."""
    state, reason, resumes_when = source.state()
    directions = Counter(peer.direction for peer in source.swarm.peers())
    statistics = source.swarm.statistics()
    versions = Counter(str(v.major) for v in source.swarm.differing_peers().values())
    return AgentFacts(
        state=state,
        reason=reason,
        resumes_when=resumes_when,
        is_idle_unknown=policy.is_idle_unknown,
        sources=tuple(
            SourceLine(name=r.name, is_well=r.is_well, value=r.value, meaning=r.meaning, fix=r.fix)
            for r in policy.reports()
        ),
        clocks=clocks,
        device=source.trainer.view.device_name,
        listen_addrs=source.swarm.listen_addrs,
        num_inbound=directions["inbound"],
        num_outbound=directions["outbound"],
        dialled_us_by_scope=dict(statistics.dialled_us_by_scope),
        num_known_peers=statistics.num_known_peers,
        num_banned=statistics.num_banned,
        differing_peers=dict(versions),
        data_note=source.data_note(),
        host_restarts=statistics.host_restarts,
    )
