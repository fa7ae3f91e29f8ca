"""The view in a real terminal shows what `status --json` says."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.system.agents import PROGRAM, RealAgent, ending, wait_until
from volunteer.locations import HOME_VARIABLE

pytestmark = [pytest.mark.system, pytest.mark.slow]


class Terminal:
    """One tmux server of our own, with one window."""

    def __init__(self, socket_file: Path, home: Path, size: tuple[int, int]) -> None:
        self._tmux = ["tmux", "-S", str(socket_file)]
        columns, rows = size
        command = f"env {HOME_VARIABLE}='{home}' '{PROGRAM}'"
        self.run("new-session", "-d", "-s", "t", "-x", f"{columns}", "-y", f"{rows}", command)

    def run(self, *args: str) -> str:
        done = subprocess.run(
            [*self._tmux, *args], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout

    def text(self) -> str:
        return self.run("capture-pane", "-p", "-t", "t")

    def pid(self) -> int:
        return int(self.run("list-panes", "-t", "t", "-F", "#{pane_pid}"))

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, timeout=20, check=False)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealAgent]:
    flags = ("--no-mdns", "--ignore-idle", "--device", "cpu", "--threads", "1", "--round-s", "5")
    agent = RealAgent(tmp_path_factory.mktemp("tui") / "a", flags)
    with ending([agent]):
        agent.start()
        agent.wait_for("two rounds", lambda s: s.round_index >= 2, 90)
        yield agent


QUIET = """\
device = "cpu"
threads = 1
mdns = false
dht = false
listen = ["/ip4/127.0.0.1/tcp/0"]
others_cpu_limit = 1.0
headless = true
pause_on_battery = false
pause_on_metered = false
"""
"""So that what else runs on the machine that tests does not count."""


@pytest.mark.timeout(120)
def test_the_first_time_one_key_leads_to_the_work_and_escape_to_nothing(tmp_path: Path) -> None:
    new = RealAgent(tmp_path / "new")
    new.home.mkdir()
    (new.home / "config.toml").write_text(QUIET)
    with ending([new]):
        for key in ("Escape", "Enter"):
            terminal = Terminal(tmp_path / f"{key}.sock", new.home, (80, 24))
            try:
                wait_until("it asks", lambda: "first time" in terminal.text(), 20)  # noqa: B023
                assert "Nothing runs yet" in terminal.text()
                assert new.allmende("status").returncode == 3
                view = terminal.pid()
                terminal.run("send-keys", "-t", "t", key)
                if key == "Escape":
                    wait_until("it left", lambda: not psutil.pid_exists(view), 15)  # noqa: B023
                    assert new.allmende("status").returncode == 3
                    continue
                wait_until("an agent", lambda: new.allmende("status").returncode == 0, 30)
                new.pids.append(new.status().agent_pid)
                new.wait_for("a step", lambda s: s.inner_step > 0, 60)
                wait_until("it says so", lambda: "Contributing" in terminal.text(), 15)  # noqa: B023
            finally:
                terminal.close()
        assert new.status().inner_step > 0, "closing the view stops nothing"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_the_view_shows_what_the_status_says(
    agent: RealAgent, tmp_path: Path, size: tuple[int, int]
) -> None:
    terminal = Terminal(tmp_path / "tmux.sock", agent.home, size)
    try:
        wait_until("the first paint", lambda: "Held-out loss" in terminal.text(), 20)

        def agreement() -> bool:
            before = json.loads(agent.allmende("status", "--json").stdout)
            text = terminal.text()
            after = json.loads(agent.allmende("status", "--json").stdout)
            if before["tip"] != after["tip"] or before["state"] != "contributing":
                return False
            shown = re.search(r"Round (\d+)", text)
            return (
                "Contributing" in text
                and before["run_name"] in text
                and before["reason"] in text
                and shown is not None
                and int(shown[1]) == before["round_index"]
                and f"{before['held_out_loss']:.4f}" in text
            )

        wait_until("view and status agree", agreement, 60)
        assert len(terminal.text().splitlines()) <= size[1]

        process = psutil.Process(terminal.pid())
        family = [process, *process.children(recursive=True)]
        mapped = {
            m.path for p in family for m in p.memory_maps() if "allmende" in " ".join(p.cmdline())
        }
        assert mapped, "the view's process was found"
        assert not [path for path in mapped if "/torch/" in path or "/fastecdsa/" in path]

        terminal.run("send-keys", "-t", "t", "p")
        wait_until("it says what a pause costs", lambda: "loses nothing" in terminal.text(), 10)
        terminal.run("send-keys", "-t", "t", "Enter")
        wait_until("it shows the pause", lambda: "Paused" in terminal.text(), 15)
        assert agent.status().state == "paused"
        terminal.run("send-keys", "-t", "t", "p")
        agent.wait_for("it goes on", lambda s: s.state == "contributing", 60)
        terminal.run("send-keys", "-t", "t", "q")
        wait_until("the view has gone", lambda: not psutil.pid_exists(process.pid), 15)
        assert agent.status().state == "contributing", "closing the view stops nothing"
    finally:
        terminal.close()
