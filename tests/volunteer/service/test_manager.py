"""Which service a system gets, and which command it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.fakes.service_programs import FakeLaunchctl
from volunteer.locations import Locations
from volunteer.service.launchd import LaunchdService
from volunteer.service.manager import find_program, find_service
from volunteer.service.service import ServiceError, run_program
from volunteer.service.systemd import SystemdService, units_dir
from volunteer.service.windows import WindowsService


@pytest.mark.parametrize(
    ("platform", "kind"),
    [("linux", SystemdService), ("darwin", LaunchdService), ("win32", WindowsService)],
)
def test_each_system_has_its_own_kind(tmp_path: Path, platform: str, kind: type) -> None:
    locations = Locations.from_environment({"ALLMENDE_HOME": str(tmp_path)})
    service = find_service(
        locations,
        {},
        program=tmp_path / "allmende",
        platform=platform,
        home_dir=tmp_path,
        run=FakeLaunchctl(),
    )
    assert type(service) is kind
    assert str(tmp_path / "allmende") in service.definition()


def test_an_unknown_system_is_told_what_to_run(tmp_path: Path) -> None:
    locations = Locations.from_environment({"ALLMENDE_HOME": str(tmp_path)})
    with pytest.raises(ServiceError, match="haiku") as caught:
        find_service(locations, {}, program=tmp_path / "allmende", platform="haiku")
    assert "allmende start --foreground" in caught.value.hint


def test_the_link_on_the_path_is_what_outlives_an_upgrade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv, bin_dir = tmp_path / "venv" / "bin", tmp_path / "bin"
    for folder in (venv, bin_dir):
        folder.mkdir(parents=True)
    (venv / "allmende").touch(0o755)
    (bin_dir / "allmende").symlink_to(venv / "allmende")
    monkeypatch.setattr(sys, "executable", str(venv / "python"))
    path = {"PATH": f"{tmp_path}{os.pathsep}{bin_dir}"}
    assert find_program(path, str(venv / "allmende")) == bin_dir / "allmende"
    # Another program of that name on the PATH is not ours.
    (bin_dir / "allmende").unlink()
    (bin_dir / "allmende").touch(0o755)
    assert find_program(path, str(venv / "allmende")) == venv / "allmende"
    assert find_program(path, "-c") == venv / "allmende"
    (venv / "allmende").unlink()
    with pytest.raises(ServiceError, match="not installed"):
        find_program(path, "-c")


def test_systemds_folder_follows_the_users_configuration(tmp_path: Path) -> None:
    assert units_dir({}, tmp_path) == tmp_path / ".config" / "systemd" / "user"
    assert units_dir({"XDG_CONFIG_HOME": "/cfg"}, tmp_path) == Path("/cfg/systemd/user")
    assert units_dir({"XDG_CONFIG_HOME": "cfg"}, tmp_path) == tmp_path / ".config/systemd/user"


def test_a_program_that_is_not_here_is_named() -> None:
    with pytest.raises(ServiceError, match="no-such-systemctl"):
        run_program(("no-such-systemctl", "--user"))


def test_the_last_words_of_a_program_are_kept() -> None:
    done = run_program((sys.executable, "-c", "import sys; print('a\\nb'); sys.exit('why\\nso')"))
    assert (done.status, done.last_words) == (1, "so")
