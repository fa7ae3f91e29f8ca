"""The doctor and two real agents: what their own sensors say, who dialled whom, what time it is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.system.agents import RealAgent, ending, wait_until
from volunteer.doctor.check import Check, Report

pytestmark = [pytest.mark.system, pytest.mark.slow]

FLAGS = ("--no-mdns", "--no-dht", "--device", "cpu", "--listen", "/ip4/127.0.0.1/tcp/0")


def examined(agent: RealAgent, area: str) -> dict[str, Check]:
    done = agent.allmende("doctor", area, "--json")
    assert done.returncode in (0, 1), done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    return {check.name: check for check in report.checks}


@pytest.mark.timeout(120)
def test_the_doctor_asks_the_agent_what_only_it_knows(tmp_path: Path) -> None:
    one = RealAgent(tmp_path / "a", FLAGS)
    with ending([one]):
        addr = one.start().listen_addrs[0]
        assert examined(one, "network")["peers"].value == "none"
        other = RealAgent(tmp_path / "b", (*FLAGS, "--bootstrap", addr))
        with ending([other]):
            other.start()
            wait_until("they met", lambda: one.status().num_peers == 1, 30)
            wait_until("it knows", lambda: other.status().num_peers == 1, 30)
            for agent, value in ((one, "1 in, 0 out"), (other, "0 in, 1 out")):
                network = examined(agent, "network")
                assert network["peers"].value == value
                assert network["reached"].level == "note", "loopback is not outside"
                clock = examined(agent, "clock")["peers"]
                assert clock.level == "well", clock
                assert "the clock is right, 1 peer says" in clock.meaning
            idle = examined(one, "idle")
            assert {"agent", "terminals", "disk", "load"} <= set(idle)
            assert not other.status().differing_peers
