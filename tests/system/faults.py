"""A lone volunteer on a machine with faults, each made where it arises and taken back again.

A disk is a real one (ext4 in a file); the wall clock and what the system says about its memory are
faked below Python, where libc is called (faults.c), for the agent and its children alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.system.agents import RealAgent, ending, is_alive, wait_until
from tests.system.swarms import tiny_spec, unbalanced
from volunteer.answers import Status
from volunteer.errors import NoAgentError
from volunteer.files import replace_file
from volunteer.locations import HOME_VARIABLE
from volunteer.run import format_run_spec

ROUND_S = 3.0
UP_DEADLINE_S = 60.0
FLAGS = (
    *("--ignore-idle", "--device", "cpu", "--threads", "1", "--no-mdns", "--no-dht"),
    *("--listen", "/ip4/127.0.0.1/tcp/0"),
)
SETTINGS = "checkpoint_every_s = 5\npause_after_s = 0\nresume_after_s = 1\n"
_SHIM = Path(__file__).with_name("faults.c")


@dataclass
class FaultyAgent(RealAgent):
    """One agent, started without the command line so that its environment is the test's."""

    environment: dict[str, str] = field(default_factory=dict, kw_only=True)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list, kw_only=True)
    stderr_file: Path = field(default=Path(os.devnull), kw_only=True)

    def spawn(self) -> None:
        with self.stderr_file.open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "volunteer.agent", *self.flags],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                env={**os.environ, **self.environment, HOME_VARIABLE: str(self.home)},
                start_new_session=True,
            )
        self.processes.append(process)
        self.pids.append(process.pid)

    def status_or_none(self) -> Status | None:
        try:
            return self.status()
        except NoAgentError:
            return None

    def wait_contributing(self, past_step: int = 0, deadline_s: float = UP_DEADLINE_S) -> Status:
        """Wait until inner steps beyond `past_step` are taken."""

        def look() -> Status | None:
            assert self.processes[-1].poll() is None, self.said()
            status = self.status_or_none()
            is_there = status is not None and status.state == "contributing"
            return status if status and is_there and status.inner_step > past_step else None

        return wait_until("steps are taken", look, deadline_s)

    def wait_state(self, state: str, words: str, deadline_s: float = 30.0) -> Status:
        """Wait for a state and a reason with these words; what ends it is told as well."""
        seen: set[str] = set()

        def is_told(status: Status) -> bool:
            seen.add(f"{status.state}: {status.reason}")
            return status.state == state and words in status.reason

        try:
            status = self.wait_for(f"{state}: {words}", is_told, deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; seen: {sorted(seen)}") from error
        assert status.resumes_when
        return status

    def wait_rounds(self, number: int, deadline_s: float = 60.0) -> Status:
        """Wait for so many commits more."""
        first = self.status().round_index
        return self.wait_for("commits", lambda s: s.round_index >= first + number, deadline_s)

    def wait_logged(self, words: str, deadline_s: float = 30.0) -> None:
        wait_until(f"the log says: {words}", lambda: words in self.logged(), deadline_s)

    def family(self) -> list[psutil.Process]:
        """Return the agent and its children."""
        process = psutil.Process(self.pids[-1])
        return [process, *process.children(recursive=True)]

    def verify_sound(self) -> None:
        """Check what every fault must leave: books that balance, no alarm."""
        assert unbalanced(self) == ""
        assert self.stats().tokens_dropped == 0
        assert self.status().alarm == ""

    def said(self) -> str:
        """Return what it wrote outside of its folder."""
        return self.stderr_file.read_text("utf-8", "replace")

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def faulty_agent(
    folder: Path, home: Path | None = None, settings: str = SETTINGS, **environment: str
) -> Iterator[FaultyAgent]:
    """Make an agent of a run of its own, not started yet; end it afterwards.

    Args:
        folder: for what is not the agent's.
        home: its folder, which may be on a disk of its own; None: in `folder`.
        settings: its config file.
        environment: what is added to the test's own.
    """
    run_file = folder / "run.toml"
    run_file.write_text(format_run_spec(tiny_spec(ROUND_S)), "utf-8")
    agent = FaultyAgent(
        home or folder / "home",
        (*FLAGS, "--run-file", str(run_file)),
        environment=environment,
        stderr_file=folder / "stderr",
    )
    agent.home.mkdir(exist_ok=True)
    replace_file(agent.home / "config.toml", settings.encode())  # survives what is done to disks
    with ending([agent]):
        yield agent
        assert not [pid for pid in agent.pids[:-1] if is_alive(pid)]


# ------------------------------------------------------------------------------- the clock


def build_shim(folder: Path) -> Path:
    """Compile faults.c; skip the test where that is not possible."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler, and Linux")
    library = folder / "faults.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-o", str(library), str(_SHIM)], check=True, timeout=60)
    return library


class WallClock:
    """The wall clock of a process, which may be set while it runs."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "clock"
        self.set(0)

    def set(self, offset_s: int) -> None:
        """Set it so many seconds beside the truth."""
        data = struct.pack("<q", offset_s)
        if not self.file.exists():
            self.file.write_bytes(data)
            return
        with self.file.open("r+b") as stream:  # the same file: it is mapped
            stream.write(data)


class Memory:
    """What the system says about its memory: the truth, or what a test says."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "meminfo"

    def fill(self, total_kb: int, available_kb: int) -> None:
        """Say that others use all but `available_kb`."""
        told = {"MemTotal": total_kb, "MemFree": available_kb, "MemAvailable": available_kb}
        lines = []
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            name = line.partition(":")[0]
            lines.append(f"{name}: {told[name]} kB" if name in told else line)
        beside = self.file.with_suffix(".new")
        beside.write_text("\n".join(lines) + "\n", "ascii")
        beside.replace(self.file)

    def free(self) -> None:
        """Say the truth again."""
        self.file.unlink()


# -------------------------------------------------------------------------------- the disk


@dataclass
class Disk:
    """A mounted file system in a file."""

    image: Path
    mount_dir: Path

    @property
    def home(self) -> Path:
        """A folder on it."""
        return self.mount_dir / "home"

    def fill(self) -> None:
        """Leave no block free."""
        with (self.mount_dir / "filler").open("ab", buffering=0) as filler:
            size_bytes = 1 << 24
            while size_bytes >= 512:
                try:
                    filler.write(bytes(size_bytes))
                except OSError:
                    size_bytes //= 2

    def make_room(self) -> None:
        """Take away what `fill` wrote."""
        (self.mount_dir / "filler").unlink()

    def fail(self) -> None:
        """Have the file system find itself damaged: the kernel makes it read-only at once."""
        device = _run("findmnt", "-n", "-o", "SOURCE", str(self.mount_dir)).strip()
        trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
        trigger.write_text("1", "ascii")

    def mount(self, options: str = "errors=remount-ro") -> None:
        _run("mount", "-o", f"loop,{options}", str(self.image), str(self.mount_dir))

    def unmount(self) -> None:
        _run("umount", str(self.mount_dir))

    def repair(self) -> None:
        """Check it as the owner would, and mount it again; nobody may use it meanwhile."""
        self.unmount()
        # 1: mended.
        assert subprocess.run(["fsck.ext4", "-p", "-f", str(self.image)]).returncode in (0, 1)
        self.mount()


@contextlib.contextmanager
def own_disk(folder: Path, size_mb: int) -> Iterator[Disk]:
    """Mount a new ext4; skip the test where that is not allowed."""
    disk = Disk(folder / "disk.img", folder / "disk")
    with disk.image.open("wb") as stream:
        stream.truncate(size_mb * 1_000_000)
    disk.mount_dir.mkdir()
    try:
        # No blocks kept back for root, whom the tests may run as.
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(disk.image))
        disk.mount()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"may not make a disk: {error}")
    try:
        yield disk
    finally:
        # Lazy: a file that a failed test left open must not keep it.
        subprocess.run(["umount", "--lazy", str(disk.mount_dir)], check=False)


def _run(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, timeout=30, check=True).stdout


# ----------------------------------------------------------------------------- the processes


def stand_still(processes: Sequence[psutil.Process], duration_s: float) -> None:
    """Stop them by a signal, as a frozen machine does, and let them go on after a time."""
    for process in processes:
        process.suspend()
    end_s = time.monotonic() + duration_s
    wait_until("the time is over", lambda: time.monotonic() > end_s, duration_s + 10.0)
    for process in processes:
        process.resume()


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """Make a group whose members may take so much memory more; skip the test where it may not."""
    root = Path("/sys/fs/cgroup")
    folder, limit = root / "memory", "memory.limit_in_bytes"
    if not folder.is_dir():
        folder, limit = root, "memory.max"
    group = folder / f"almd-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes), "ascii")
    except OSError as error:
        pytest.skip(f"may not limit a process's memory: {error}")
    try:
        yield group
    finally:
        wait_until("the group is empty", lambda: _is_removed(group), 30.0)


def _is_removed(group: Path) -> bool:
    with contextlib.suppress(OSError):  # its member has not ended yet
        group.rmdir()
    return not group.exists()
