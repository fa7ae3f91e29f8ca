"""Agents of several versions: a newer minor one trains along, another major one is told so."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from tests.fakes import newer
from tests.system import newer_agent
from tests.system.agents import RealAgent, ending, wait_until
from tests.system.swarms import tiny_spec
from tui.peers_answer import UPDATE
from volunteer.answers import PeerStatus, Status
from volunteer.errors import ControlError
from volunteer.locations import HOME_VARIABLE
from volunteer.run import format_run_spec

pytestmark = [pytest.mark.system, pytest.mark.slow]
FLAGS = (
    *("--no-mdns", "--no-dht", "--ignore-idle", "--device", "cpu", "--threads", "1"),
    *("--listen", "/ip4/127.0.0.1/tcp/0"),
)
ROOT = Path(__file__).parents[2]
ROUND_S = 8.0
WAIT_S = 240.0


@dataclass
class OneAgent(RealAgent):
    """One of some version, started without the terminal program."""

    version: str = ""
    """major.minor; empty: the program's own."""
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self) -> Status:
        module = ["tests.system.newer_agent", self.version] if self.version else ["volunteer.agent"]
        command = [sys.executable, "-m", *module, *self.flags]
        self.home.mkdir(parents=True)
        with (self.home / "stderr").open("wb") as stderr:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, HOME_VARIABLE: str(self.home)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        self.pids.append(process.pid)
        self.processes.append(process)

        def look() -> Status | None:
            tail = (self.home / "stderr").read_text(errors="replace")[-2000:]
            assert process.poll() is None, f"{self.home.name} has ended: {tail}"
            try:
                return self.status()
            except ControlError:
                return None

        return wait_until(f"{self.home.name} answers", look, WAIT_S)

    def end(self) -> None:
        if all(process.poll() is not None for process in self.processes):
            return
        super().end()
        for process in self.processes:
            process.wait(30.0)


def peers(agent: RealAgent) -> list[PeerStatus]:
    return msgspec.json.decode(agent.allmende("peers", "--json").stdout, type=list[PeerStatus])


def test_what_a_newer_agent_replaces_is_where_the_program_takes_it_from() -> None:
    """The long test below is not run at each change: a part that has moved is seen here."""
    missing = [
        f"{module.__name__}.{name}"
        for module, name, _ in newer_agent.replacements("1.7")
        if not hasattr(module, name)
    ]
    assert missing == []


@pytest.mark.full
@pytest.mark.timeout(900)
def test_three_versions_in_one_run(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(format_run_spec(tiny_spec(ROUND_S)), encoding="utf-8")
    flags = (*FLAGS, "--run-file", str(run_file))
    ours = OneAgent(tmp_path / "ours", flags)
    agents = [ours]
    with ending(agents):
        addr = ours.start().listen_addrs[0]
        joining = (*flags, "--bootstrap", addr)
        minor = OneAgent(tmp_path / "minor", joining, version="1.7")
        major = OneAgent(tmp_path / "major", joining, version="2.0")
        agents += [minor, major]
        minor.start()
        major.start()

        told = ours.wait_for("the other major", lambda s: bool(s.differing_peers), WAIT_S)
        assert told.differing_peers == {"2": 1}
        told = major.wait_for(
            "it is told and left alone",
            lambda s: bool(s.differing_peers) and not s.num_peers,
            WAIT_S,
        )
        assert told.protocol == "2.0"
        note = f"1 peer speaks protocol 2, this is 1: {UPDATE}."
        assert note in ours.allmende("peers").stdout
        assert note in ours.allmende("status").stdout
        their_note = "2 peers speak protocol 1, this is 2: they have to be updated."
        major.wait_for("both", lambda s: s.differing_peers == {"1": 2}, WAIT_S)
        assert major.allmende("peers").stdout.strip() == their_note
        assert "this is 1: update this program" in ours.logged()
        assert "this is 2: it has to be updated" in major.logged()

        major.end()

        (peer,) = peers(ours)
        assert (peer.protocol, peer.program) == ("1.7", newer.PROGRAM)
        wait_until(
            "both are listed in one commit",
            lambda: any(p.num_contributions == 2 for p in ours.history()),
            WAIT_S,
        )
        height = ours.status().round_index
        ours.wait_for("two more rounds", lambda s: s.round_index >= height + 2, WAIT_S)
        wait_until(
            "one state", lambda: ours.status().state_hash == minor.status().state_hash, WAIT_S
        )
        known = ours.chain()
        authors = {known.contributions[i].author for f in known.facts.values() for i in f.listed}
        assert authors == {ours.status().peer_id, minor.status().peer_id}
        for agent in (ours, minor, major):
            assert "banned" not in agent.logged()
            assert "misdeed" not in agent.logged()
