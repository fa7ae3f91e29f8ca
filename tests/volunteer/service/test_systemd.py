"""The user unit: what it says, and that nothing of it is left."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fakes.service_programs import FakeSystemctl
from volunteer.service.service import ServiceCommand, ServiceError, service_command
from volunteer.service.systemd import SystemdService, unit_text, units_dir

PROGRAM = Path("/home/ada/.local/bin/allmende")
ODD_HOME = '/srv/a "home" of 100% $HOME\\n'


class Machine:
    """One user's files, and a manager."""

    def __init__(self, home: Path, **environ: str) -> None:
        self.home = home
        folder = units_dir({}, home)
        self.systemctl = FakeSystemctl(folder)
        self.service = SystemdService(
            command=service_command(PROGRAM, environ),
            units_dir=folder,
            user="ada",
            run=self.systemctl,
            linger_dir=home / "linger",
        )

    def files(self) -> set[str]:
        return {str(file.relative_to(self.home)) for file in self.home.rglob("*")}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def identity_of(file: Path) -> tuple[int, int]:
    """Return what differs once a file has been replaced."""
    return file.stat().st_ino, file.stat().st_mtime_ns


def settings(text: str) -> dict[str, list[str]]:
    """Return the unit's settings; a key may come more than once."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def test_the_unit_yields_to_everything_else_and_lets_work_be_saved() -> None:
    unit = settings(unit_text(service_command(PROGRAM, {})))
    assert unit["ExecStart"] == [f'"{PROGRAM}" "start" "--foreground"']
    assert unit["Nice"] == ["19"]
    assert unit["CPUSchedulingPolicy"] == ["idle"]
    assert unit["IOSchedulingClass"] == ["idle"]
    assert unit["KillMode"] == ["mixed"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == ["2"]
    assert int(unit["TimeoutStopSec"][0]) >= 60
    assert unit["WantedBy"] == ["default.target"]
    assert "Environment" not in unit


def test_odd_folders_come_through_systemds_quoting() -> None:
    command = ServiceCommand(
        program=Path(ODD_HOME) / "allmende", home=ODD_HOME, variables={"ALLMENDE_HOME": ODD_HOME}
    )
    unit = settings(unit_text(command))
    (line,) = unit["Environment"]
    # systemd's quoting is that of C; shlex knows its two escapes inside quotes.
    assert shlex.split(line.replace("%%", "%")) == [f"ALLMENDE_HOME={ODD_HOME}"]
    words = shlex.split(unit["ExecStart"][0].replace("%%", "%").replace("$$", "$"))
    assert words == [f"{ODD_HOME}/allmende", "start", "--foreground"]


def test_the_shells_own_folders_are_passed_on(tmp_path: Path) -> None:
    command = service_command(PROGRAM, {"XDG_DATA_HOME": "/data", "XDG_STATE_HOME": "", "A": "b"})
    assert dict(command.variables) == {"XDG_DATA_HOME": "/data"}
    both = service_command(PROGRAM, {"XDG_DATA_HOME": "/data", "ALLMENDE_HOME": str(tmp_path)})
    assert dict(both.variables) == {"ALLMENDE_HOME": str(tmp_path)}
    with pytest.raises(ServiceError, match="character"):
        service_command(PROGRAM, {"ALLMENDE_HOME": "/a\nExecStart=/bin/evil"})


def test_installing_twice_changes_nothing_and_starts_nothing(machine: Machine) -> None:
    machine.service.install(is_now=False)
    written = identity_of(machine.service.file)
    assert machine.service.file.read_text() == machine.service.definition()
    assert machine.systemctl.active == set()
    machine.service.install(is_now=False)
    assert identity_of(machine.service.file) == written
    status = machine.service.status()
    assert (status.is_installed, status.is_enabled, status.is_current) == (True, True, True)
    assert (status.is_running, status.is_before_login) == (False, False)
    machine.service.install(is_now=True)
    assert machine.service.status().is_running


def test_uninstalling_leaves_nothing_and_ends_it(machine: Machine) -> None:
    before = machine.files()
    machine.service.install(is_now=True)
    assert machine.files() > before
    assert machine.service.uninstall()
    assert machine.files() == before
    assert machine.systemctl.active == set()
    assert not machine.service.uninstall()
    assert not machine.service.status().is_installed


def test_uninstalling_leaves_the_units_of_others(machine: Machine) -> None:
    other = machine.service.units_dir / "default.target.wants" / "other.service"
    other.parent.mkdir(parents=True)
    other.touch()
    before = machine.files()
    second = Machine(machine.home, ALLMENDE_HOME="/srv/second")
    second.service.install(is_now=False)
    machine.service.install(is_now=False)
    assert machine.service.file != second.service.file
    machine.service.uninstall()
    assert second.service.status().is_enabled
    second.service.uninstall()
    assert machine.files() == before


def test_without_a_manager_nothing_is_installed_and_all_can_be_removed(machine: Machine) -> None:
    machine.systemctl.has_manager = False
    before = machine.files()
    with pytest.raises(ServiceError, match=r"no user manager.*No medium found") as caught:
        machine.service.install(is_now=True)
    assert "allmende start" in caught.value.hint
    assert machine.files() == before
    machine.systemctl.has_manager = True
    machine.service.install(is_now=False)
    machine.systemctl.has_manager = False
    assert machine.service.uninstall()
    assert machine.files() == before


def test_what_does_not_end_is_told(machine: Machine) -> None:
    machine.service.install(is_now=True)
    machine.systemctl.is_stubborn = True
    with pytest.raises(ServiceError, match="still runs"):
        machine.service.uninstall()
    assert machine.service.file.exists()


def test_the_status_names_what_is_wrong(machine: Machine) -> None:
    machine.service.install(is_now=False)
    (machine.home / "linger").mkdir()
    (machine.home / "linger" / "ada").touch()
    machine.service.file.write_text("[Service]\nExecStart=/usr/bin/false\n")
    (machine.service.units_dir / "default.target.wants" / machine.service.unit).unlink()
    status = machine.service.status()
    assert (status.is_current, status.is_enabled, status.is_before_login) == (False, False, True)
    assert "not enabled" in status.problem


@pytest.mark.slow
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here")
    program = tmp_path / "allmende"
    program.touch(0o755)
    unit = tmp_path / "allmende.service"
    unit.write_text(unit_text(service_command(program, {"ALLMENDE_HOME": "/srv/a 100% home"})))
    assert verify(unit) == ""
    # The check would notice.
    unit.write_text(unit.read_text().replace("Nice=19", "Nice=190").replace("mixed", "gently"))
    assert "Nice priority out of range" in (found := verify(unit))
    assert "kill mode" in found


def verify(unit: Path) -> str:
    """Return what systemd says against a unit."""
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(unit.parent), "HOME": str(unit.parent)},
        timeout=20,
        check=False,
    )
    return done.stderr + done.stdout
