"""The LaunchAgent, by launchd.plist(5): fixture-tested only, never on a Mac."""

from __future__ import annotations

import plistlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.service_programs import FakeLaunchctl
from volunteer.service.launchd import LaunchdService
from volunteer.service.service import ServiceError, service_command

PROGRAM = Path("/Users/ada/.local/bin/allmende")


def _is_strings(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_keep_alive(value: object) -> bool:
    keys = {"SuccessfulExit", "Crashed"}
    return isinstance(value, dict) and set(value) <= keys and all(map(_is_bool, value.values()))


KEYS: dict[str, Callable[[object], bool]] = {
    "Label": lambda value: isinstance(value, str),
    "ProgramArguments": _is_strings,
    "EnvironmentVariables": lambda value: (
        isinstance(value, dict) and _is_strings([*value.values()])
    ),
    "RunAtLoad": _is_bool,
    "KeepAlive": _is_keep_alive,
    "ThrottleInterval": _is_whole,
    "ExitTimeOut": _is_whole,
    "ProcessType": lambda value: value in ("Background", "Standard", "Adaptive", "Interactive"),
    "LowPriorityIO": _is_bool,
    "LowPriorityBackgroundIO": _is_bool,
    "Nice": lambda value: _is_whole(value) and -20 <= int(str(value)) <= 20,
    "StandardErrorPath": lambda value: isinstance(value, str),
}
"""launchd.plist(5): the keys and the types of their values."""


class Mac:
    def __init__(self, home: Path, **environ: str) -> None:
        self.launchctl = FakeLaunchctl()
        self.service = LaunchdService(
            command=service_command(PROGRAM, environ),
            agents_dir=home / "Library" / "LaunchAgents",
            log_file=home / "Library" / "Logs" / "allmende" / "agent.log",
            user_id=501,
            run=self.launchctl,
        )


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    return Mac(tmp_path)


def test_every_key_is_one_that_launchd_knows(tmp_path: Path) -> None:
    mac = Mac(tmp_path, ALLMENDE_HOME="/Volumes/a <home> & more")
    keys = plistlib.loads(mac.service.definition().encode(), fmt=plistlib.FMT_XML)
    assert {name for name, value in keys.items() if not KEYS[name](value)} == set()
    assert keys["ProgramArguments"] == [str(PROGRAM), "start", "--foreground"]
    assert keys["EnvironmentVariables"] == {"ALLMENDE_HOME": "/Volumes/a <home> & more"}
    assert keys["Label"] == mac.service.file.stem
    assert keys["RunAtLoad"] is True
    assert keys["KeepAlive"] == {"SuccessfulExit": False}
    assert keys["ProcessType"] == "Background"
    assert keys["LowPriorityIO"] is True
    assert keys["Nice"] == 19
    assert keys["ExitTimeOut"] == 60


def test_it_is_there_for_the_next_login_and_starts_at_once_only_if_wanted(mac: Mac) -> None:
    mac.launchctl.disabled.add(mac.service.label)
    mac.service.install(is_now=False)
    assert mac.launchctl.loaded == set()
    assert mac.launchctl.disabled == set()
    written = mac.service.file.stat().st_ino
    mac.service.install(is_now=True)
    assert mac.service.file.stat().st_ino == written
    assert mac.service.status().is_running
    calls = len(mac.launchctl.calls)
    mac.service.install(is_now=True)  # it goes on: nothing is loaded again
    assert "bootout" not in {call[0] for call in mac.launchctl.calls[calls:]}


def test_another_definition_replaces_what_runs(mac: Mac) -> None:
    mac.service.install(is_now=True)
    mac.service.file.write_bytes(plistlib.dumps({"Label": mac.service.label}))
    assert not mac.service.status().is_current
    mac.service.install(is_now=True)
    assert mac.service.status().is_current
    assert mac.service.status().is_running


def test_uninstalling_leaves_nothing(mac: Mac) -> None:
    mac.service.install(is_now=True)
    assert mac.service.uninstall()
    assert not mac.service.file.exists()
    assert mac.launchctl.loaded == set()
    assert not mac.service.uninstall()
    assert not mac.service.status().is_installed


def test_without_a_session_it_cannot_start_now(mac: Mac) -> None:
    mac.launchctl.has_session = False
    with pytest.raises(ServiceError, match="not logged in") as caught:
        mac.service.install(is_now=True)
    assert "without --now" in caught.value.hint
    assert not mac.service.file.exists()
