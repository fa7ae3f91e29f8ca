"""Finish a round, then pause or stop; a snooze that outlives a restart; limits that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.agents import RealAgent, ending, is_alive, wait_until

pytestmark = [pytest.mark.system, pytest.mark.slow]
ROUND_S = "5"
_QUIET = ("--no-mdns", "--no-dht", "--ignore-idle", "--device", "cpu", "--threads", "1")
FLAGS = (*_QUIET, "--round-s", ROUND_S, "--listen", "/ip4/127.0.0.1/tcp/0")


@pytest.mark.timeout(300)
def test_a_round_is_finished_before_the_pause_and_before_the_stop(tmp_path: Path) -> None:
    agent = RealAgent(tmp_path / "a", FLAGS)
    with ending([agent]):
        agent.start()
        running = agent.wait_for("steps are taken", lambda s: s.state == "contributing", 120)
        said = agent.allmende("pause", "--finish")
        assert said.returncode == 0, said.stderr
        assert "this machine pauses, as you said." in said.stdout
        paused = agent.wait_for(
            "the round has closed", lambda s: s.state == "paused" and s.release is not None, 60
        )
        assert paused.reason.startswith("finished as you said: round ")
        assert paused.round_index > running.round_index
        assert paused.release is not None
        assert (paused.release.num_processes >= 2, paused.release.problem) == (True, "")
        assert agent.contributions(), "the round was not missed"
        children = (running.trainer_pid, running.aggregator_pid)
        assert not any(is_alive(pid) for pid in children if pid is not None)
        assert agent.allmende("resume").returncode == 0
        agent.wait_for("steps are taken", lambda s: s.state == "contributing", 120)
        said = agent.allmende("stop", "--finish")
        assert said.returncode == 0, said.stderr
        assert "the agent stops, as you said." in said.stdout
        wait_until("the agent has ended", lambda: not is_alive(agent.pids[-1]), 60)
        assert agent.start().state != "paused", "`stop` is no pause"


@pytest.mark.timeout(120)
def test_a_snooze_goes_on_after_a_restart(tmp_path: Path) -> None:
    agent = RealAgent(tmp_path / "a", FLAGS)
    with ending([agent]):
        agent.start()
        assert agent.allmende("pause", "--for", "30m").returncode == 0
        before = agent.status()
        assert before.resumes_at_utc
        agent.kill()
        agent.start()
        after = agent.wait_for("it knows", lambda s: s.state == "paused", 30)
        assert after.resumes_at_utc[:15] == before.resumes_at_utc[:15], "to ten minutes"
        assert "left)" in after.resumes_when
        assert after.trainer_pid is None


@pytest.mark.timeout(60)
def test_limits_with_which_it_could_never_run_are_refused_with_the_numbers(tmp_path: Path) -> None:
    agent = RealAgent(tmp_path / "a", FLAGS)
    agent.locations.prepare()
    agent.locations.config_file.write_text("disk_max_bytes = 67108864\n", encoding="utf-8")
    refused = agent.allmende("start", *FLAGS)
    assert refused.returncode != 0
    assert "it could never run: `disk_max_bytes` is 0.07 GB" in refused.stderr
