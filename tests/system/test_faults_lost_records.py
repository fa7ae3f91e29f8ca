"""The run's folder of one of three is deleted, its key is not: it signs nothing twice."""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.system.agents import RealAgent, wait_until
from tests.system.swarms import (
    ROUND_S,
    SLACK_S,
    local_swarm,
    report,
    unbalanced,
    wait_contributing,
    wait_one_tip,
)
from volunteer.agent.record_book import verify_envelope
from volunteer.agent.record_log import RecordLog
from volunteer.rounds.records import DENSE_MODULE, Commit, Contribution, author_of
from volunteer.rounds.silence import LISTEN_ROUNDS

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.full]


def signed_by(peer_id: str, witness: RealAgent, run_id: str) -> Counter[tuple[str, str]]:
    """Count what a member has signed for each base and parent, as another one keeps it."""
    counts: Counter[tuple[str, str]] = Counter()
    record_file = witness.locations.record_file(run_id, DENSE_MODULE)
    with tempfile.TemporaryDirectory() as folder:
        for file in record_file.parent.glob(f"{record_file.name}*"):
            shutil.copy(file, folder)
        log = RecordLog(Path(folder) / record_file.name)
        for envelope in log.all():
            record = verify_envelope(envelope, run_id, DENSE_MODULE).record
            if author_of(record) != peer_id:
                continue
            if isinstance(record, Contribution):
                counts["contribution", record.base] += 1
                counts["vote", str(record.round_index)] += record.vote
            elif isinstance(record, Commit):
                counts["commit", record.parent] += 1
        log.close()
    return counts


@pytest.mark.timeout(400)
def test_who_has_lost_its_records_listens_and_is_not_banned(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        lan = swarm.network.add_bridge()
        agents = [swarm.add(lan) for _ in range(3)]
        swarm.start(*agents)
        loser, *others = agents
        for agent in agents:
            agent.wait_for("four rounds", lambda s: s.round_index >= 4 and s.num_peers == 2, 120)
        before = loser.status()
        signed = signed_by(before.peer_id, others[0], before.run_id)
        assert sum(signed.values()) > 4
        loser.end()
        shutil.rmtree(loser.locations.run_dir(before.run_id))
        loser.start()
        silent = loser.wait_for("it listens", lambda s: "it trains, and signs" in s.reason, 60)
        assert silent.peer_id == before.peer_id
        assert f"{LISTEN_ROUNDS:g} rounds" in silent.resumes_when
        assert "no longer on this disk" in loser.logged()
        begun = max(agent.status().round_index for agent in others)
        wait_contributing([loser], 40 * ROUND_S)
        spoke = max(agent.status().round_index for agent in others)

        def is_listed() -> bool:
            return any(p.own_listed and p.round_index > begun for p in loser.history())

        wait_until("it contributes again", is_listed, 20 * (ROUND_S + SLACK_S))
        report(f"silent from round {begun} to {spoke}; listed again since")
        wait_one_tip(agents, 8 * (ROUND_S + SLACK_S))
        again = signed_by(before.peer_id, others[0], before.run_id)
        assert sum(again.values()) > sum(signed.values())
        assert [what for what, count in again.items() if count > 1] == []
        for agent in others:
            assert before.peer_id in {peer.peer_id for peer in agent.peers()}, "it is not banned"
            assert unbalanced(agent) == ""
        assert unbalanced(loser) == ""
