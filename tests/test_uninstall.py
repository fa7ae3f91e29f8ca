"""Installing anew and removing: every agent of the program is stopped first, in any folder."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
import venv
from pathlib import Path

import pytest

import volunteer
from tests.fakes.installer_machine import ROOT, STUBBORN_AGENT, Machine
from tests.fakes.service_programs import FakeSystemctl
from tui.client import ControlClient
from volunteer.answers import Status
from volunteer.errors import NoAgentError
from volunteer.locations import Locations
from volunteer.service.launchd import LABEL_PREFIX
from volunteer.service.service import service_command
from volunteer.service.systemd import SystemdService, units_dir

pytestmark = pytest.mark.slow
STOP_AGENTS = ROOT / "packaging" / "stop_agents.py"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine where all is there but the program."""
    return Machine(tmp_path)


def test_second_run_stops_every_agent_and_replaces_the_program(machine: Machine) -> None:
    machine.install()
    machine.calls_file.write_text("")
    other = machine.home / "second one"
    with machine.running_agent(None) as first, machine.running_agent(other, "--device", "cpu") as b:
        done = machine.install()
        assert done.returncode == 0, done.stderr
        assert (first.wait(10), b.wait(10)) == (0, 0)
    plan, _, work = done.stdout.partition("To undo")
    assert "stop the agents that run" in plan
    assert f"  process {first.pid}, the usual folder\n" in plan
    assert f"  process {b.pid}, folder {other}, flags: --device cpu\n" in plan
    assert f"Stopping the agent (process {b.pid}, folder {other}" in work
    assert machine.calls[0] == f"pipx install --force {ROOT}"
    assert "an agent still runs" not in machine.calls
    assert "allmende start` starts" not in done.stdout


def test_agent_that_does_not_stop_keeps_its_program(machine: Machine, tmp_path: Path) -> None:
    hasty = tmp_path / "checkout" / "packaging"
    shutil.copytree(ROOT / "packaging", hasty)
    script = hasty / "install.sh"
    text = script.read_text()
    script.write_text(text.replace("STOP_DEADLINE_S=60 ", "STOP_DEADLINE_S=0.3 "))
    assert script.read_text() != text
    machine.install()
    machine.calls_file.write_text("")
    with machine.running_agent(None, script=STUBBORN_AGENT) as agent:
        for arguments in ((), ("--uninstall",)):
            done = machine.install(*arguments, script=script)
            assert done.returncode == 1
            assert f"It has not ended: process {agent.pid}, the usual folder." in done.stderr
            assert "the program stays as it is" in done.stderr
    assert machine.calls == []


def test_processes_of_others_are_not_agents_of_the_program(machine: Machine) -> None:
    machine.install()
    other = Machine(machine.home)
    other.install()
    with other.running_agent(None) as agent:
        assert _listed(machine.venv) == ""
        assert _listed(other.venv) == f"process {agent.pid}, the usual folder\n"
        assert machine.install("--uninstall").returncode == 0
        assert agent.poll() is None


def _listed(folder: Path) -> str:
    command = [sys.executable, "-I", str(STOP_AGENTS), "--list", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.system
@pytest.mark.timeout(60)
def test_uninstall_stops_a_real_agent_in_another_folder(machine: Machine, tmp_path: Path) -> None:
    machine.install()
    (machine.venv / "bin" / "python").unlink()
    venv.EnvBuilder(symlinks=True).create(machine.venv)
    packages = next((machine.venv / "lib").glob("python3*")) / "site-packages"
    paths = [sysconfig.get_path("purelib"), str(Path(str(volunteer.__file__)).parents[1])]
    (packages / "program.pth").write_text("\n".join(paths))
    home = tmp_path / "second volunteer"
    flags = ("--ignore-idle", "--device", "cpu", "--listen", "/ip4/127.0.0.1/tcp/0")
    with subprocess.Popen(
        [str(machine.venv / "bin" / "python"), "-P", "-m", "volunteer.agent", *flags],
        env={**os.environ, "ALLMENDE_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
    ) as agent:
        try:
            _wait_answering(home, agent)
            done = machine.install("--uninstall")
            assert done.returncode == 0, done.stderr
            assert agent.wait(20) == 0
        finally:
            agent.kill()
    assert f"Stopping the agent (process {agent.pid}, folder {home}, flags: " in done.stdout
    assert f"  {home}\n" in done.stdout, "what it leaves is named"
    assert "ended\n" in (home / "logs" / "agent.log").read_text()
    assert not machine.venv.exists()
    assert (home / "identity.key").exists()


def _wait_answering(home: Path, agent: subprocess.Popen[bytes]) -> None:
    never = threading.Event()
    socket_file = Locations.from_environment({"ALLMENDE_HOME": str(home)}).control_socket
    while agent.poll() is None:
        with contextlib.suppress(NoAgentError), ControlClient(socket_file) as client:
            client.request("status", Status)
            return
        never.wait(0.1)
    raise AssertionError("the agent ended at once")


def test_uninstall_stops_the_agent_first_and_is_repeatable(machine: Machine) -> None:
    machine.install()
    data = machine.home / ".local/share/allmende"
    data.mkdir(parents=True)
    with machine.running_agent(machine.home / "other") as agent:
        (machine.home / "other").mkdir()
        done = machine.install("--uninstall")
        assert done.returncode == 0, done.stderr
        assert agent.wait(10) == 0
    assert machine.calls[-1] == "pipx uninstall allmende"
    assert "an agent still runs" not in machine.calls
    assert not (machine.home / ".local/bin/allmende").exists()
    assert f"\n  {data}\n  {machine.home}/other\nand any other folder" in done.stdout
    again = machine.install("--uninstall")
    assert again.returncode == 0
    assert "not installed" in again.stdout
    assert f"\n  {data}\nand any other folder" in again.stdout
    machine.remove("pipx")
    without_pipx = machine.install("--uninstall")
    assert without_pipx.returncode == 0
    assert f"\n  {data}\n" in without_pipx.stdout


def test_what_starts_it_at_login_goes_with_the_program(machine: Machine) -> None:
    machine.install()
    before = set(machine.home.rglob("*"))
    systemctl = FakeSystemctl(units_dir({}, machine.home))
    environs: list[dict[str, str]] = [{}, {"ALLMENDE_HOME": str(machine.home / "second")}]
    for environ in environs:
        command = service_command(machine.home / ".local/bin/allmende", environ)
        SystemdService(
            command=command, units_dir=systemctl.units_dir, user="ada", run=systemctl
        ).install(is_now=False)
    label = f"{LABEL_PREFIX}allmende"
    assert label.startswith("org.allmende.")
    agent = machine.home / "Library/LaunchAgents" / f"{label}.plist"
    agent.parent.mkdir(parents=True)
    agent.touch()
    other = systemctl.units_dir / "allmende-of-another.service"
    other.write_text("[Service]\nExecStart=/bin/true\n")
    machine.add("systemctl", ":")
    done = machine.install("--uninstall")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("It no longer starts at login: ") == 3
    disabled = [call for call in machine.calls if "disable --now" in call]
    assert len(disabled) == 2
    assert machine.calls.index(disabled[-1]) < machine.calls.index("pipx uninstall allmende")
    assert other.exists()
    other.unlink()
    left = {file for file in machine.home.rglob("*") if file.is_file()}
    assert left <= before


@pytest.mark.skipif(platform.system() != "Linux", reason="the stub machine is a Linux one")
def test_the_folders_that_uninstall_names_are_the_programs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(machine.home))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    places = Locations.from_environment({})
    for folder in (places.data_dir, places.config_file.parent, places.log_dir):
        folder.mkdir(parents=True)
    named = machine.install("--uninstall").stdout
    for folder in (places.data_dir, places.config_file.parent, places.log_dir.parent):
        assert f"\n  {folder}\n" in named
