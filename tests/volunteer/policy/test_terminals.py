"""Typing in terminals: whose, when, and what does not count."""

from __future__ import annotations

import math
import os
import pty
import stat
import time
from pathlib import Path

import pytest

from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.terminals import (
    TerminalReading,
    TerminalSource,
    find_relays,
    terminal_of,
)

PTS, CONSOLE = 136, 4
"""Major numbers of /dev/pts/N and /dev/ttyN."""


class Machine:
    """Terminals and processes that a test makes, and two clocks."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.places = Places(dev_dir=folder / "dev", proc_dir=folder / "proc")
        (folder / "dev" / "pts").mkdir(parents=True)
        (folder / "proc").mkdir()
        self.read_at: dict[str, float] = {}
        self.now_s, self.utc_s = 5000.0, 1.8e9
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(time, "time", lambda: self.utc_s)
        self.source = TerminalSource(self.places, self.status)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        self.utc_s += seconds

    def open(self, name: str, idle_s: float = 0.0) -> None:
        (self.places.dev_dir / name).touch()
        self.read_at[name] = self.utc_s - idle_s

    def type(self, name: str) -> None:
        self.read_at[name] = self.utc_s

    def status(self, file: Path) -> os.stat_result:
        name = str(file.relative_to(self.places.dev_dir))
        if name not in self.read_at:
            raise FileNotFoundError(name)
        read_at = self.read_at[name]
        result = os.stat_result(
            (stat.S_IFCHR, 0, 0, 1, 0, 5, 0, read_at, read_at, read_at),
            {"st_rdev": device(name), "st_atime": read_at},
        )
        assert result.st_rdev == device(name)
        return result

    def run(self, pid: int, name: str, terminal: str | None, *, is_in_front: bool = True) -> None:
        """Have a process; `name` may be as odd as a process may call itself."""
        tty = encoded(device(terminal)) if terminal else 0
        front = pid if is_in_front else 1
        (self.places.proc_dir / str(pid)).mkdir()
        line = f"{pid} ({name}) S 1 {pid} {pid} {tty} {front} 4194304 0"
        (self.places.proc_dir / str(pid) / "stat").write_text(line)


def device(name: str) -> int:
    number = int(name.removeprefix("pts/").removeprefix("tty"))
    return os.makedev(PTS + number // 256 if name.startswith("pts/") else CONSOLE, number % 256)


def encoded(number: int) -> int:
    major, minor = os.major(number), os.minor(number)
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_the_last_one_typed_in_counts(machine: Machine) -> None:
    machine.open("pts/0", idle_s=60.0)
    machine.open("pts/1", idle_s=5.0)
    machine.open("tty1", idle_s=9000.0)
    (machine.places.dev_dir / "ttyS0").touch()
    (machine.places.dev_dir / "pts" / "ptmx").touch()
    assert machine.source.read() == TerminalReading(4995.0, "pts/1")
    machine.pass_s(10.0)
    machine.type("tty1")
    assert machine.source.read() == TerminalReading(5010.0, "tty1")


def test_without_terminals_nobody_has_typed(machine: Machine) -> None:
    assert machine.source.read().touched_at_s == -math.inf
    (machine.places.dev_dir / "pts").rmdir()
    assert machine.source.read().touched_at_s == -math.inf
    machine.source.close()


def test_one_that_is_closed_is_forgotten(machine: Machine) -> None:
    machine.open("pts/0")
    assert machine.source.read().name == "pts/0"
    del machine.read_at["pts/0"]
    assert machine.source.read().touched_at_s == -math.inf


@pytest.mark.parametrize("jump_s", [86400.0, -86400.0])
def test_a_clock_that_is_set_moves_nobodys_keys(machine: Machine, jump_s: float) -> None:
    machine.open("pts/0", idle_s=100.0)
    assert machine.source.read().touched_at_s == 4900.0
    machine.utc_s += jump_s
    assert machine.source.read().touched_at_s == 4900.0
    machine.pass_s(1.0)
    machine.type("pts/0")
    assert machine.source.read().touched_at_s == 5001.0


def test_a_terminal_from_the_future_was_typed_in_now(machine: Machine) -> None:
    machine.open("pts/0", idle_s=-1000.0)
    assert machine.source.read().touched_at_s == 5000.0


def test_what_is_typed_for_this_program_does_not_count(machine: Machine) -> None:
    machine.open("pts/0", idle_s=300.0)
    machine.open("pts/1", idle_s=400.0)
    machine.source.read()
    machine.type("pts/0")
    assert machine.source.read() == TerminalReading(5000.0, "pts/0")
    machine.source.note_talk(device("pts/0"))
    assert machine.source.read() == TerminalReading(4600.0, "pts/1")
    machine.pass_s(20.0)
    machine.type("pts/0")
    assert machine.source.read() == TerminalReading(5020.0, "pts/0"), "but what comes later does"


def test_keys_that_tmux_passes_on_count_where_they_arrive(machine: Machine) -> None:
    machine.open("pts/0")  # the window or SSH in which tmux is attached
    machine.open("pts/1", idle_s=50.0)  # the shell inside
    machine.run(100, "tmux: client", "pts/0")
    machine.run(101, "bash", "pts/1")
    assert machine.source.read() == TerminalReading(4950.0, "pts/1")


def test_relays_are_known_by_their_foreground_program(machine: Machine) -> None:
    machine.run(1, "systemd", None)
    machine.run(100, "tmux: client", "pts/300")
    machine.run(101, "screen", "pts/1")
    machine.run(102, "screen", "pts/2", is_in_front=False)
    machine.run(103, "evil) S 1 2 3 (tmux", "pts/3")
    (machine.places.proc_dir / "self").mkdir()
    (machine.places.proc_dir / "104").mkdir()
    (machine.places.proc_dir / "105").mkdir()
    (machine.places.proc_dir / "105" / "stat").write_text("105 (x")
    assert find_relays(machine.places.proc_dir) == {device("pts/300"), device("pts/1")}


def test_a_process_has_the_terminal_it_was_started_in(machine: Machine) -> None:
    machine.run(100, "allmende", "pts/7")
    machine.run(101, "agent", None)
    assert terminal_of(100, machine.places.proc_dir) == device("pts/7")
    assert terminal_of(101, machine.places.proc_dir) is None
    assert terminal_of(102, machine.places.proc_dir) is None


def test_a_real_terminal_is_seen() -> None:
    """The kernel moves its access time in steps of 8 s; it is set here instead of typed."""
    master, slave = pty.openpty()
    try:
        name = os.ttyname(slave)
        source = TerminalSource(Places())
        os.utime(name, (time.time() - 500.0, time.time()))
        source.read()
        os.utime(name, (time.time(), time.time()))
        reading = source.read()
        assert reading.touched_at_s == pytest.approx(time.monotonic(), abs=2.0)
        assert reading.name == name.removeprefix("/dev/")
    finally:
        os.close(master)
        os.close(slave)
