"""Above its memory limit an agent begins anew: the same process, port and socket; no loss."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.system.agents import wait_until
from tests.system.swarms import local_swarm, report, unbalanced, wait_contributing
from tui.client import ControlClient
from volunteer.answers import Status

pytestmark = [pytest.mark.system, pytest.mark.slow]

BEGAN_ANEW = "began anew: memory was"
LIMIT = 64 * 1024**2
"""Below what any agent takes: it is above its limit from the start."""


@pytest.mark.timeout(120)
def test_it_is_back_in_the_same_place_and_nobody_found_the_door_shut(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        lan = swarm.network.add_bridge()
        growing, other = swarm.add(lan), swarm.add(lan)
        growing.locations.prepare()
        growing.locations.config_file.write_text(f"agent_memory_limit_bytes = {LIMIT}\n", "utf-8")
        swarm.start(growing, other)
        before = growing.status()
        wait_contributing([growing], 60.0)
        trainer_pid = growing.status().trainer_pid
        seen: list[Status] = []
        with ControlClient(growing.locations.control_socket, deadline_s=60.0) as client:

            def says_so() -> bool:
                seen.append(client.request("status", Status))
                return seen[-1].is_restarting

            wait_until("it says that it begins anew", says_so, 60.0)
        assert seen[-1].state == "starting"
        assert "its memory had grown" in seen[-1].reason

        # Whoever asks from now on gets an answer, late perhaps; no second agent could start.
        def is_back() -> bool:
            with ControlClient(growing.locations.control_socket, deadline_s=60.0) as again:
                seen.append(again.request("status", Status))
            return not seen[-1].is_restarting

        wait_until("it is back", is_back, 60.0)
        after = seen[-1]
        assert growing.processes[-1].poll() is None
        assert after.agent_pid == before.agent_pid == growing.pids[-1]
        assert after.listen_addrs == before.listen_addrs
        assert BEGAN_ANEW in growing.logged()
        wait_contributing([growing], 60.0)
        assert growing.status().trainer_pid not in (None, trainer_pid)
        wait_until("they meet again", lambda: growing.status().num_peers == 1, 30.0)
        assert unbalanced(growing) == ""
        assert growing.logged().count(BEGAN_ANEW) == 1
        began = re.search(r"beginning anew: memory=(\d+)", growing.logged())
        assert began is not None
        report(f"memory before {int(began[1]) / 1e6:.0f} MB")


@pytest.mark.full
@pytest.mark.timeout(120)
def test_not_twice_in_an_hour_and_that_is_said(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        growing = swarm.add(swarm.network.add_bridge())
        growing.locations.prepare()
        growing.locations.config_file.write_text(f"agent_memory_limit_bytes = {LIMIT}\n", "utf-8")
        swarm.start(growing)
        wait_until("it has begun anew", lambda: BEGAN_ANEW in growing.logged(), 60.0)
        told = growing.wait_for("it says why not", lambda s: bool(s.memory_note), 60.0)
        assert "`agent_memory_limit_bytes`" in told.memory_note
        assert "Memory" in growing.allmende("status").stdout
        assert growing.logged().count(BEGAN_ANEW) == 1
