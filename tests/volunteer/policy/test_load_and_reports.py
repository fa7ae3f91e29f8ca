"""What other programs do with the CPU, and how every source is put in words."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from volunteer.config import Config
from volunteer.policy.report import SourceReport, report_source
from volunteer.policy.sensors import load
from volunteer.policy.sensors.load import LoadReading, LoadSource, own_processes
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.session_bus import DesktopReading
from volunteer.policy.sensors.small import PowerReading
from volunteer.policy.sensors.system_bus import Session, SystemReading
from volunteer.policy.sensors.terminals import TerminalReading
from volunteer.policy.sensors.watcher import Reading
from volunteer.policy.signals import GpuReading

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="a Linux machine of folders"),
]


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(proc_dir=tmp_path)


# ------------------------------------------------------------------------------------------- load


class Cpu:
    """The machine's and the processes' CPU seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.user, self.idle, self.own = 1000.0, 9000.0, 50.0
        self.processes = {500: ("ffmpeg", 10.0), 501: ("cc1", 0.0), 10: ("python", 5.0)}
        self.now_s = 100.0
        monkeypatch.setattr(psutil, "cpu_times", self.times)
        monkeypatch.setattr(load, "_cpu_seconds", lambda pid: self.own)
        monkeypatch.setattr(load, "own_processes", lambda proc_dir: frozenset({10}))
        monkeypatch.setattr(psutil, "process_iter", self.iterate)
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.user, system=0.0, idle=self.idle, iowait=3.0)

    def iterate(self, attributes: list[str]) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(
                pid=pid,
                info={
                    "name": name,
                    "cpu_times": SimpleNamespace(user=seconds, system=0.0),
                    "cmdline": [f"/usr/bin/{name}", "-x"],
                },
            )
            for pid, (name, seconds) in self.processes.items()
        ]

    def pass_s(self, seconds: float, *, ours: float, others: float) -> None:
        """Let time pass on 4 cores, in which ours and others use so many of them."""
        self.now_s += seconds
        self.user += seconds * (ours + others)
        self.idle += seconds * (4 - ours - others)
        self.own += seconds * ours
        self.processes[500] = ("ffmpeg", self.processes[500][1] + seconds * others)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Cpu:
    return Cpu(monkeypatch)


def read_load(source: LoadSource) -> LoadReading:
    return source.read()


def test_our_own_use_of_the_cpu_is_not_others(cpu: Cpu, places: Places) -> None:
    source = LoadSource(places, Config)
    assert source.read().others_cpu_fraction is None, "not measured yet"
    cpu.pass_s(2.0, ours=3.0, others=0.5)
    assert source.read().others_cpu_fraction == pytest.approx(0.125)
    cpu.pass_s(2.0, ours=3.0, others=0.5)
    reading = source.read()
    assert reading.others_cpu_fraction == pytest.approx(0.125)
    assert reading.others_cpu == ()
    source.close()


def test_a_short_burst_is_averaged_and_a_long_one_is_named(cpu: Cpu, places: Places) -> None:
    source = LoadSource(places, Config)
    fractions: list[float | None] = []
    names: tuple[str, ...] = ()
    for others in (0.0, 0.0, 0.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        reading = source.read()
        fractions.append(reading.others_cpu_fraction)
        names = reading.others_cpu
        cpu.pass_s(2.0, ours=1.0, others=others)
    assert fractions[4] is not None
    assert fractions[4] < 0.25, "two seconds of it are no use yet"
    assert fractions[-1] == pytest.approx(0.5)
    assert names == ("ffmpeg (50 %)",)


def test_programs_to_be_alone_with_are_found_by_name(cpu: Cpu, places: Places) -> None:
    wishes = SimpleNamespace(config=Config(exclusive_programs=("FFmpeg.exe", "blender")))
    source = LoadSource(places, lambda: wishes.config)
    cpu.now_s += 10.0
    assert source.read().exclusive == ("FFmpeg.exe",)
    del cpu.processes[500]
    assert source.read().exclusive == ("FFmpeg.exe",), "looked for every few seconds"
    cpu.processes[502] = ("blender", 0.0)
    cpu.now_s += 10.0
    assert source.read().exclusive == ("blender",)
    wishes.config = Config()
    assert source.read().exclusive == ()


def test_ours_are_this_process_and_its_descendants(tmp_path: Path) -> None:
    assert os.getpid() in own_processes()
    assert os.getpid() in own_processes(tmp_path), "without that file, psutil tells"
    pid = os.getpid()
    for parent, children in ((pid, "20 21"), (20, "30"), (21, ""), (30, "")):
        folder = tmp_path / str(parent) / "task" / str(parent)
        folder.mkdir(parents=True)
        (folder / "children").write_text(children)
    assert own_processes(tmp_path) == {pid, 20, 21, 30}


def test_a_process_that_has_ended_used_nothing() -> None:
    assert load._cpu_seconds(2**22 + 1) == 0.0
    assert load._cpu_seconds(os.getpid()) > 0.0


# ---------------------------------------------------------------------------------------- reports


@pytest.mark.parametrize(
    ("name", "reading", "expected"),
    [
        ("disk", Reading(3 * 10**9), ("3.0 GB", "free where the data lies")),
        (
            "session bus",
            Reading(None),
            ("none", "it is not there on this machine, and is not needed"),
        ),
        (
            "terminals",
            Reading(TerminalReading(90.0, "pts/3")),
            ("10 s", "since typing at pts/3 was last seen"),
        ),
        (
            "terminals",
            Reading(TerminalReading(float("-inf"))),
            ("nobody", "nobody has typed in a terminal"),
        ),
        (
            "session bus",
            Reading(DesktopReading(touched_at_s=60.0, inhibitors=("vlc",), games=2)),
            ("40 s", "since input, GNOME says; vlc keeps the screen on; 2 games run"),
        ),
        (
            "session bus",
            Reading(DesktopReading(is_saver_on=True, problem="X hangs")),
            ("no Mutter", "not GNOME: input is told elsewhere; the screen saver shows; X hangs"),
        ),
        (
            "system bus",
            Reading(SystemReading(sessions=(Session("me", True, True, True, None),))),
            ("1 sessions", "at a desktop: me (locked); network unknown whether metered"),
        ),
        (
            "load",
            Reading(LoadReading(0.5, ("cc1 (50 %)",), 0, ())),
            ("50 %", "of the CPU is used by other programs: cc1 (50 %)"),
        ),
        (
            "NVIDIA",
            Reading(GpuReading()),
            ("cannot tell apart", "of the GPU is used by other programs"),
        ),
        ("power", Reading(PowerReading(True, 71.5)), ("on battery", "CPU at 72 degrees")),
        ("settings", Reading(Config()), ("read", "settings is as it should be")),
    ],
)
def test_every_source_is_put_in_words(
    name: str, reading: Reading[object], expected: tuple[str, str]
) -> None:
    report = report_source(name, reading, 100.0)
    assert (report.value, report.meaning) == expected
    assert report.is_well
    assert report.fix == ""


@pytest.mark.parametrize(
    ("name", "problem", "fix"),
    [
        ("X11 :0", "it does not let us in (no)", "run the agent as the user of that desktop"),
        ("Wayland wayland-0", "it does not tell", "allmende config set headless true"),
        ("NVIDIA", "the NVIDIA driver was updated: reboot", "sudo reboot"),
        ("settings", "bad", "allmende config path"),
        ("disk", "has not answered for 3 s", ""),
    ],
)
def test_what_fails_comes_with_what_helps(name: str, problem: str, fix: str) -> None:
    assert report_source(name, Reading(None, problem), 0.0) == SourceReport(
        name=name, is_well=False, value="-", meaning=f"it cannot tell: {problem}", fix=fix
    )


def test_what_has_not_told_yet_is_no_failure() -> None:
    assert report_source("disk", Reading(None, is_first=True), 0.0).is_well


def test_our_own_memory_is_counted_only_where_it_is_limited() -> None:
    assert LoadSource(Places(), Config).read().own_ram_bytes is None
    held = LoadSource(Places(), lambda: Config(ram_max_bytes=10**12)).read().own_ram_bytes
    assert held is not None
    assert 5_000_000 < held <= psutil.Process().memory_info().rss + 10**9
    block = bytearray(b"x" * 200_000_000)
    more = LoadSource(Places(), lambda: Config(ram_max_bytes=10**12)).read().own_ram_bytes
    assert more is not None
    assert more - held > len(block) / 2
