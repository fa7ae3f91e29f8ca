"""Real desktops without a screen: an X server, sway, KWin; a test is skipped where one is missing.

As root the compositors run as `nobody`, since sway refuses to run as root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.system.agents import wait_until

UP_DEADLINE_S = 30.0
NOBODY = 65534


def need(program: str, package: str) -> str:
    """Return the file of a program; skip the test where it is not installed."""
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"needs Debian's package {package}")
    return found


@contextlib.contextmanager
def _running(argv: Sequence[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        argv,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # The whole group: dbus-run-session leaves its bus and its program behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


@contextlib.contextmanager
def x_server() -> Iterator[int]:
    """Yield the number of a display of a real X server."""
    program = need("Xvfb", "xvfb")
    read_end, write_end = os.pipe()
    argv = [program, "-displayfd", str(write_end), "-screen", "0", "640x480x24", "-nolisten", "tcp"]
    argv += ["-noreset"]  # or it begins anew when the last one leaves, and resets who connects then
    process = subprocess.Popen(
        argv,
        pass_fds=[write_end],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(write_end)
    try:
        with os.fdopen(read_end) as told:
            yield int(told.readline())
    finally:
        process.terminate()
        process.wait(10)


def touch(display: int) -> None:
    """Move the mouse, as a hand would: over the X server's own input extension."""
    subprocess.run(
        [need("xdotool", "xdotool"), "mousemove_relative", "--", "7", "3"],
        env={**os.environ, "DISPLAY": f":{display}"},
        check=True,
        timeout=20,
    )


@contextlib.contextmanager
def _runtime_dir() -> Iterator[Path]:
    # Sockets have short names, and pytest's folders are not nobody's.
    with tempfile.TemporaryDirectory(prefix="wl") as folder:
        if os.getuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


def _as_nobody(*argv: str) -> list[str]:
    if os.getuid() != 0:
        return list(argv)
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *argv]


def _wait_socket(process: subprocess.Popen[bytes], folder: Path, name: str) -> Path:
    def look() -> Path | None:
        assert process.poll() is None, f"{name} has ended"
        return next((file for file in folder.glob("wayland-?") if file.is_socket()), None)

    return wait_until(f"{name} listens", look, UP_DEADLINE_S)


@contextlib.contextmanager
def sway() -> Iterator[Path]:
    """Yield the socket of a sway that draws nowhere."""
    program = need("sway", "sway")
    with _runtime_dir() as folder:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
            "WLR_BACKENDS": "headless",
            "WLR_LIBINPUT_NO_DEVICES": "1",
            "WLR_RENDERER": "pixman",
        }
        with _running(_as_nobody(program, "-c", "/dev/null"), environment) as process:
            yield _wait_socket(process, folder, "sway")


@contextlib.contextmanager
def kwin() -> Iterator[Path]:
    """Yield the socket of a KWin that draws nowhere."""
    program, runner = need("kwin_wayland", "kwin-wayland"), need("dbus-run-session", "dbus-daemon")
    with _runtime_dir() as folder:
        # The installed file has capabilities that nobody may not have; KWin insists on its name.
        copy = shutil.copy(program, folder / "kwin_wayland")
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "XDG_RUNTIME_DIR": str(folder),
            "KWIN_COMPOSE": "Q",
        }
        argv = (runner, str(copy), "--virtual", "--no-lockscreen", "--socket", "wayland-9")
        with _running(_as_nobody(*argv), environment) as process:
            yield _wait_socket(process, folder, "KWin")


def type_at(socket_file: Path) -> None:
    """Press a key through a compositor's virtual keyboard."""
    subprocess.run(
        [need("wtype", "wtype"), "a"],
        env={
            **os.environ,
            "XDG_RUNTIME_DIR": str(socket_file.parent),
            "WAYLAND_DISPLAY": socket_file.name,
        },
        check=True,
        timeout=20,
    )
