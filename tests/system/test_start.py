"""What is started is our program, wherever one stands; what is stopped leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.system.agents import PROGRAM, RealAgent, ending, is_alive, wait_until
from volunteer.answers import Status
from volunteer.locations import HOME_VARIABLE

pytestmark = [pytest.mark.system, pytest.mark.slow]
STOPPED = "stopped; nothing is left running"


def installed_environment(**changes: str) -> dict[str, str]:
    """The environment without the checkout: Python may have been told to look into folders."""
    return {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **changes}


@pytest.fixture
def hostile_dir(tmp_path: Path) -> Path:
    """A folder whose files are named as what we import, and leave a trace when they are run."""
    folder = tmp_path / "downloads"
    for name in ("trio.py", "torch.py", "psutil.py", "volunteer/__init__.py", "p2p/__init__.py"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        trace = tmp_path / f"ran {name.replace('/', ' ')}"
        file.write_text(f"open({str(trace)!r}, 'w').close()\nraise SystemExit(9)\n")
    return folder


def traces(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.glob("ran *")]


@pytest.mark.timeout(120)
def test_no_file_of_the_current_folder_is_run_by_a_start(tmp_path: Path, hostile_dir: Path) -> None:
    agent = RealAgent(tmp_path / "a")
    flags = ("--ignore-idle", "--device", "cpu", "--threads", "1", "--round-s", "600")
    with ending([agent]):
        done = subprocess.run(
            [str(PROGRAM), "start", *flags, "--json"],
            env=installed_environment(**{HOME_VARIABLE: str(agent.home)}),
            cwd=hostile_dir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        status = msgspec.json.decode(done.stdout, type=Status)
        agent.pids.append(status.agent_pid)
        process = psutil.Process(status.agent_pid)
        assert process.cwd() == "/"
        agent.wait_for("all children run", lambda s: s.state == "contributing", 90)
        assert {child.cwd() for child in process.children()} == {"/"}
        again = agent.allmende("start", *flags)
        assert "An agent runs already" in again.stdout, "the flags are still found"
    assert not traces(tmp_path)


def test_an_agent_whose_folder_cannot_be_used_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "volunteer.agent"],
        env={**os.environ, HOME_VARIABLE: str(tmp_path / "file" / "home")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "cannot be made: a file is in the way" in line
    assert "(hint: " in line


class Demo:
    """A demo that runs, and what it says."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)

    def wait_for(self, words: str) -> None:
        wait_until(words, lambda: any(words in line for line in self.said), 60.0)

    def end(self, signal_number: int) -> tuple[int, str]:
        """Ask it to end; return its exit status and what it printed on stdout."""
        self.process.send_signal(signal_number)
        status = self.process.wait(60)
        self._reader.join(10)
        assert self.process.stdout is not None
        return status, self.process.stdout.read()


@contextlib.contextmanager
def running_demo(tmp_path: Path, cwd: Path, *flags: str) -> Iterator[Demo]:
    with subprocess.Popen(
        [str(PROGRAM), "demo", "--volunteers", "2", "--minutes", "2", *flags],
        env=installed_environment(TMPDIR=str(tmp_path)),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Demo(process)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)


def processes_of(folder: Path) -> list[int]:
    """Processes whose environment or arguments name `folder`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = [*process.cmdline(), process.environ().get("TMPDIR", "")]
            if process.pid != os.getpid() and any(str(folder) in word for word in words):
                found.append(process.pid)
    return [pid for pid in found if is_alive(pid)]


@pytest.mark.timeout(180)
def test_ctrl_c_ends_the_demo_and_nothing_is_left(tmp_path: Path, hostile_dir: Path) -> None:
    with running_demo(tmp_path, hostile_dir, "--json") as demo:
        demo.wait_for("training for 2 min")
        assert demo.said[0].startswith("Starting 2 volunteers on this machine")
        assert len(processes_of(tmp_path)) >= 6, "the check below sees agents and their children"
        status, printed = demo.end(signal.SIGINT)
    assert (status, printed) == (130, "")
    assert demo.said[-1] == f"{STOPPED}\n"
    assert not [line for line in demo.said if "Traceback" in line]
    assert not processes_of(tmp_path)
    assert not list(tmp_path.glob("allmende-demo-*"))
    assert not traces(tmp_path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_demo_ends_in_order_from_the_first_moment(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    with running_demo(tmp_path, tmp_path) as demo:
        demo.wait_for("Starting 2 volunteers")
        status, printed = demo.end(signal_number)
    assert (status, printed) == (130, "")
    assert demo.said[1:] == [f"{STOPPED}\n"]
    assert not processes_of(tmp_path)
    assert not list(tmp_path.glob("allmende-demo-*"))


@pytest.mark.timeout(120)
def test_a_demo_that_is_closed_with_its_terminal_ends_its_agents(tmp_path: Path) -> None:
    with running_demo(tmp_path, tmp_path) as demo:
        demo.wait_for("volunteer 1 of 2 is up")
        assert demo.end(signal.SIGHUP) == (130, "")
    assert not processes_of(tmp_path)
