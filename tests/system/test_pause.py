"""The owner pauses: no step after a second, no trainer after five, no token lost."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.system.agents import RealAgent, ending, is_alive
from tests.system.swarms import report
from volunteer.data.builtin import load_builtin_run

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_pauses", [8, pytest.param(20, marks=pytest.mark.full)])
def test_pauses_at_the_commons_size_lose_no_token(tmp_path: Path, num_pauses: int) -> None:
    spec = load_builtin_run("commons")
    tokens_per_step = spec.inner.batch_sequences * spec.model.context_tokens
    agent = RealAgent(
        tmp_path / "a",
        ("--no-mdns", "--ignore-idle", "--device", "cpu", "--round-s", "15", "--threads", "2"),
    )
    with ending([agent]):
        agent.start()
        paused_step = 0
        for _ in range(num_pauses):
            running = agent.wait_for(
                "steps are taken",
                lambda s, least=paused_step: s.state == "contributing" and s.inner_step > least,  # type: ignore[misc]
                60,
            )
            trainer_pid = running.trainer_pid
            assert trainer_pid is not None
            done = agent.allmende("pause", "--json")
            assert done.returncode == 0, done.stderr
            assert not is_alive(trainer_pid)
            status = agent.status()
            assert (status.state, status.trainer_pid) == ("paused", None)
            paused_step = status.inner_step
            stats = agent.stats()
            assert stats.inner_steps == paused_step, "the checkpoint has every step"
            assert stats.tokens_done == paused_step * tokens_per_step
            parts = (
                stats.tokens_confirmed
                + stats.tokens_in_flight
                + stats.tokens_pending
                + stats.tokens_refused
                + stats.tokens_dropped
            )
            assert parts == stats.tokens_done
            assert stats.tokens_dropped == 0
            assert agent.allmende("resume").returncode == 0
        stops = re.findall(r"last_step_after_s=([\d.]+) gone_after_s=([\d.]+)", agent.logged())
        assert len(stops) == num_pauses
        last_s, gone_s = (max(map(float, seconds)) for seconds in zip(*stops, strict=True))
        report(f"{num_pauses} pauses: last step after {last_s} s at most, gone after {gone_s} s")
        assert last_s < 1.0
        assert gone_s < 5.0
