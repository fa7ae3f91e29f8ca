"""A real user manager of systemd starts the agent, and nothing of it is left afterwards.

The manager runs in a mount namespace of its own, where `/run/systemd/system` says that systemd is
there; else it would not start on a machine that was booted without it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from tests.system.agents import PROGRAM, is_alive, wait_until
from tui.client import ControlClient
from volunteer.answers import Status
from volunteer.errors import NoAgentError
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.service.service import ServiceStatus

pytestmark = [pytest.mark.system, pytest.mark.slow]

MANAGER = Path("/lib/systemd/systemd")
START = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system || exit 9
exec setpriv --pdeathsig KILL "$0" --user --log-target=console
"""
SETTINGS = 'listen = ["/ip4/127.0.0.1/tcp/0"]\nmdns = false\ndht = false\n'
"""Nobody outside this machine hears of it."""
UP_S = 30.0


@dataclass
class Manager:
    """A user manager with a home of its own."""

    process: subprocess.Popen[bytes]
    environ: dict[str, str]
    home: Path

    @property
    def allmende_home(self) -> Path:
        return Path(self.environ[HOME_VARIABLE])

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command where the manager is."""
        return subprocess.run(
            ["nsenter", "-t", str(self.process.pid), "-m", *argv],
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def allmende(self, *argv: str) -> str:
        done = self.run(str(PROGRAM), *argv)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def service(self) -> ServiceStatus:
        return msgspec.json.decode(self.allmende("service", "status", "--json"), type=ServiceStatus)

    def status(self) -> Status | None:
        locations = Locations.from_environment({HOME_VARIABLE: str(self.allmende_home)})
        try:
            with ControlClient(locations.control_socket, deadline_s=20.0) as client:
                return client.request("status", Status)
        except NoAgentError:
            return None

    def files(self) -> set[str]:
        """Return all that lies in the user's home, but for what the program stores."""
        found = (str(file.relative_to(self.home)) for file in self.home.rglob("*"))
        return {name for name in found if not name.startswith(self.allmende_home.name)}


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    if sys.platform != "linux" or not MANAGER.exists() or os.getuid() != 0:
        pytest.skip("needs Linux, systemd's programs and root")
    home = tmp_path / "home"
    home.mkdir()
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    environ = {
        **{name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ},
        "HOME": str(home),
        "XDG_RUNTIME_DIR": str(runtime),
        HOME_VARIABLE: str(home / "volunteer 1"),
    }
    volunteer = Path(environ[HOME_VARIABLE])
    volunteer.mkdir()
    (volunteer / "config.toml").write_text(SETTINGS, "utf-8")
    log_file = tmp_path / "manager.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", START, str(MANAGER)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    made = Manager(process, environ, home)
    try:
        wait_up(made, log_file)
        yield made
    finally:
        end(made)


def wait_up(manager: Manager, log_file: Path) -> None:
    """Wait until the manager answers; skip where it cannot live here."""

    def is_up() -> bool:
        if manager.process.poll() is not None:
            tail = log_file.read_text(errors="replace")[-300:]
            pytest.skip(f"no user manager can run here: {tail}")
        private = Path(manager.environ["XDG_RUNTIME_DIR"], "systemd", "private")
        return private.exists() and manager.run(
            "systemctl", "--user", "show", "--property=Version"
        ).stdout.startswith("Version=")

    wait_until("the user manager answers", is_up, UP_S)


def end(manager: Manager) -> None:
    """End the manager with all that it started."""
    started: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(manager.process.pid).children(recursive=True)
    if manager.process.poll() is None:
        manager.run("systemctl", "--user", "exit")
        try:
            manager.process.wait(20)
        except subprocess.TimeoutExpired:
            manager.process.kill()
            manager.process.wait()
    for one in started:
        if one.is_running():
            one.kill()


@pytest.mark.timeout(180)
def test_it_is_started_with_the_lowest_priority_stopped_and_removed(manager: Manager) -> None:
    before = manager.files()
    if shutil.which("nsenter") is None:
        pytest.skip("nsenter is not here")
    told = manager.allmende("service", "install", "--now")
    assert "It starts at login: systemd user unit allmende-" in told
    status = wait_until("the agent answers", manager.status, UP_S)
    unit = manager.service()
    assert (unit.is_installed, unit.is_enabled, unit.is_running) == (True, True, True)
    assert unit.is_current
    assert unit.problem == ""

    process = psutil.Process(status.agent_pid)
    assert process.nice() == 19
    assert os.sched_getscheduler(process.pid) == os.SCHED_IDLE
    assert process.ionice().ioclass == psutil.IOPRIO_CLASS_IDLE
    main_pid = manager.run("systemctl", "--user", "show", "--property=MainPID", unit.name).stdout
    assert main_pid.strip() == f"MainPID={process.pid}"  # the command became the agent

    manager.allmende("service", "install", "--now")  # again changes nothing
    assert is_alive(process.pid)

    manager.allmende("stop")  # the owner's word is no crash: it stays stopped
    wait_until("it has ended", lambda: not is_alive(process.pid), UP_S)
    wait_until("its unit rests", lambda: not manager.service().is_running, UP_S)
    assert manager.service().problem == ""

    manager.run("systemctl", "--user", "start", unit.name)
    again = wait_until("the agent answers again", manager.status, UP_S)
    assert "It no longer starts at login." in manager.allmende("service", "uninstall")
    wait_until("it has ended as well", lambda: not is_alive(again.agent_pid), UP_S)
    assert manager.files() == before
    assert not manager.service().is_installed
    listed = manager.run("systemctl", "--user", "list-unit-files", "allmende*").stdout
    assert "allmende" not in listed


@pytest.mark.timeout(60)
def test_without_a_user_manager_it_is_refused_with_the_reason(tmp_path: Path) -> None:
    if sys.platform != "linux" or shutil.which("systemctl") is None:
        pytest.skip("needs Linux and systemctl")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DBUS_")}
    done = subprocess.run(
        [str(PROGRAM), "service", "install"],
        env={
            **environ,
            "HOME": str(tmp_path),
            "XDG_RUNTIME_DIR": str(tmp_path / "none"),
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
            HOME_VARIABLE: str(tmp_path / "volunteer"),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "no user manager of systemd" in done.stderr
    assert "allmende start" in done.stderr
    assert not (tmp_path / "config").exists()


@pytest.mark.full
@pytest.mark.timeout(180)
def test_a_crash_is_followed_by_a_new_start(manager: Manager) -> None:
    manager.allmende("service", "install", "--now")
    first = wait_until("the agent answers", manager.status, UP_S)
    os.kill(first.agent_pid, signal.SIGKILL)
    wait_until("it is gone", lambda: not is_alive(first.agent_pid), UP_S)
    second = wait_until("it is there again", manager.status, 90.0)
    assert second.agent_pid != first.agent_pid
    manager.allmende("service", "uninstall")
