"""Everything lies where it is said to, and nobody else can take the control socket's place."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from volunteer.errors import ConfigError
from volunteer.files import lock_folder
from volunteer.locations import MAX_SOCKET_BYTES, Locations

RUN_ID = "0123456789abcdef" * 4


def at_home(home: Path | str) -> Locations:
    return Locations.from_environment({"ALLMENDE_HOME": str(home)})


def test_a_home_overrides_every_location(tmp_path: Path) -> None:
    home = tmp_path / "home"
    locations = at_home(home)
    module_dir = home / "runs" / RUN_ID / "modules" / "dense"
    assert locations.data_dir == home
    assert locations.config_file == home / "config.toml"
    assert locations.log_dir == home / "logs"
    assert locations.identity_file == home / "identity.key"
    assert locations.stats_file == home / "stats.sqlite"
    assert locations.run_spec_file(RUN_ID) == home / "runs" / RUN_ID / "spec.toml"
    assert locations.module_dir(RUN_ID, "dense") == module_dir
    assert locations.record_file(RUN_ID, "dense") == module_dir / "records.sqlite"
    assert locations.blobs_dir(RUN_ID, "dense") == module_dir / "blobs"
    assert locations.trainer_dir(RUN_ID, "dense") == module_dir / "trainer"
    with lock_folder(locations.data_dir):
        assert (home / "lock").exists()


def test_a_home_may_be_relative_or_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert at_home("here/../there").data_dir == tmp_path / "there"
    assert at_home("~/allmende").data_dir == Path("/home/someone/allmende")


def test_without_a_home_the_system_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime_dir = tmp_path / "run"
    runtime_dir.mkdir(mode=0o700)
    for name in ("DATA", "CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_dir))
    for environ in ({}, {"ALLMENDE_HOME": ""}):
        locations = Locations.from_environment(environ)
        assert locations.data_dir == tmp_path / "data" / "allmende"
        assert locations.config_file == tmp_path / "config" / "allmende" / "config.toml"
        assert locations.log_dir.is_relative_to(tmp_path / "state" / "allmende")
        assert locations.control_socket.name.endswith("sock")


def test_without_a_login_session_there_is_still_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert Locations.from_environment({}).control_socket.is_absolute()


def test_an_unsafe_runtime_folder_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dirs: object) -> Path:
        raise PermissionError("/tmp/runtime-1000 is another user's")

    monkeypatch.setattr("volunteer.locations.PlatformDirs.user_runtime_path", property(refuse))
    with pytest.raises(ConfigError, match="another user") as caught:
        Locations.from_environment({})
    assert "ALLMENDE_HOME" in caught.value.hint


@pytest.mark.parametrize("length", [1, 40, 60, 80, 120, 200])
def test_the_socket_always_has_a_name_that_a_socket_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    home = tmp_path / ("ä" * (length // 2 + 1))
    locations = at_home(home)
    name = locations.control_socket
    assert len(os.fsencode(name)) <= MAX_SOCKET_BYTES
    assert at_home(home).control_socket == name
    assert at_home(home / "other").control_socket != name
    locations.prepare()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(name))
    name.unlink()


def test_a_long_temporary_folder_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 90)
    name = at_home("/" + "h" * 90).control_socket
    assert len(os.fsencode(name)) <= MAX_SOCKET_BYTES
    assert name.parent == Path(f"/tmp/allmende-{os.getuid()}")


def test_folders_are_for_the_owner_alone(tmp_path: Path) -> None:
    locations = at_home(tmp_path / "home")
    locations.verify_control_dir()
    locations.prepare()
    locations.prepare()
    made = [tmp_path / "home", *(tmp_path / "home").iterdir()]
    assert {path.name for path in made} >= {"home", "runs", "logs"}
    assert {path.stat().st_mode & 0o777 for path in made} == {0o700}


def test_a_home_that_cannot_be_used_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file" / "home", tmp_path / "file", Path("/proc/none")):
        with pytest.raises(ConfigError, match="cannot be made: ") as caught:
            at_home(home).prepare()
        assert "ALLMENDE_HOME" in caught.value.hint
    locations = at_home(tmp_path / "home")
    locations.prepare()

    def is_allowed(folder: Path, mode: int) -> bool:
        return folder.name != "logs"

    monkeypatch.setattr(os, "access", is_allowed)  # tests may run as root, whom no mode stops
    with pytest.raises(ConfigError, match="logs cannot be written to"):
        locations.prepare()


def test_a_control_folder_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own may be too long for a socket
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    locations = at_home("/" + "h" * 120)
    folder = locations.control_socket.parent
    assert folder.parent == short
    folder.mkdir(mode=0o700)
    locations.verify_control_dir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="only you") as caught:
        locations.verify_control_dir()
    assert "ALLMENDE_HOME" in caught.value.hint
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError):
        locations.verify_control_dir()
    folder.unlink()
    folder.write_text("")
    with pytest.raises(ConfigError):
        locations.verify_control_dir()
    folder.unlink()
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(ConfigError):
        locations.verify_control_dir()
    shutil.rmtree(short)


@pytest.mark.parametrize("bad", ["", "..", "../x", "A", "a/b", "a\x00", ".a", "a" * 65, "a\n"])
def test_no_id_names_a_folder_elsewhere(tmp_path: Path, bad: str) -> None:
    locations = at_home(tmp_path)
    with pytest.raises(ValueError, match="module id"):
        locations.module_dir(RUN_ID, bad)
    for run_id in (bad, RUN_ID[1:], RUN_ID.upper(), RUN_ID + "0"):
        with pytest.raises(ValueError, match="run id"):
            locations.run_dir(run_id)
