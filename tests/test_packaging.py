"""The install and test commands, on machines made of stubs; and what the built package contains.

The real installation is nox's `install` session: it takes a minute and the network.
"""

from __future__ import annotations

import importlib.metadata
import os
import pty
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import pytest

import volunteer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
INSTALL = ROOT / "packaging" / "install.sh"
TOOLS = (
    "sh",
    "dirname",
    "uname",
    "awk",
    "df",
    "tr",
    "sed",
    "cat",
    "rm",
    "sort",
    "env",
    "mkdir",
    "cp",
)
PIPX = """
case "$*" in
  --version) echo 1.18.4 ;;
  "environment --value PIPX_BIN_DIR") echo "$HOME/.local/bin" ;;
  "environment --value PIPX_LOCAL_VENVS") echo "$HOME/venvs" ;;
  install*)
    echo "with $PIPX_DEFAULT_PYTHON" >>"$CALLS"
    mkdir -p "$HOME/.local/bin" "$HOME/venvs/allmende/bin"
    cp "$STUBS/allmende-program" "$HOME/.local/bin/allmende"
    cp "$STUBS/allmende-program" "$HOME/venvs/allmende/bin/allmende"
    cp "$STUBS/python3" "$HOME/venvs/allmende/bin/python" ;;
  "uninstall allmende") rm -r "$HOME/venvs/allmende" "$HOME/.local/bin/allmende" ;;
esac
"""
PROGRAM = """
case "$*" in
  status) [ -e "$HOME/agent" ] || exit 3 ;;
  stop) rm "$HOME/agent" ;;
  "") echo "the dashboard" ;;
esac
"""


class Machine:
    """A PATH of stubs, an empty HOME, and a list of what was called."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        tools = folder / "tools"  # apart from the stubs: writing one must never follow a link
        self.home = folder / "a home"
        self.path = f"{self.bin}:{tools}"
        self.calls_file = folder / "calls"
        for made in (self.bin, tools, self.home):
            made.mkdir()
        self.calls_file.touch()
        for tool in TOOLS:
            (tools / tool).symlink_to(str(shutil.which(tool)))
        self.add("python3", f'exec "{sys.executable}" "$@"', is_recorded=False)
        self.add("gcc", "cat >/dev/null")  # accepts any source: every header is there
        self.add("id", "echo 1000", is_recorded=False)
        self.add("pipx", PIPX)
        self.add("allmende-program", PROGRAM)

    def add(self, name: str, script: str, *, is_recorded: bool = True) -> None:
        """Put a stub on the PATH."""
        record = f'echo "{name} $*" >>"$CALLS"\n' if is_recorded else ""
        file = self.bin / name
        file.write_text(f"#!/bin/sh\n{record}{script}\n")
        file.chmod(0o755)

    def remove(self, *names: str) -> None:
        """Take tools off the PATH."""
        for name in names:
            (self.bin / name).unlink()

    @property
    def environment(self) -> dict[str, str]:
        """What the installer sees."""
        return {
            "PATH": self.path,
            "HOME": str(self.home),
            "CALLS": str(self.calls_file),
            "STUBS": str(self.bin),
        }

    @property
    def calls(self) -> list[str]:
        """The stubs' calls so far, but for questions about versions and places."""
        asked = ("--version", "environment", "-fsyntax-only", "program status")
        lines = self.calls_file.read_text().splitlines()
        return [line for line in lines if not any(word in line for word in asked)]

    def install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run install.sh without a terminal."""
        return subprocess.run(
            ["/bin/sh", str(INSTALL), *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def install_at_terminal(self, typed: bytes, *arguments: str) -> str:
        """Run install.sh at a terminal, with `typed` typed ahead; return what the screen shows."""
        master, slave = pty.openpty()
        os.write(master, typed)
        subprocess.run(
            ["/bin/sh", str(INSTALL), *arguments],
            env=self.environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            check=False,
        )
        os.close(slave)
        shown = b"".join(_read_to_end(master))
        os.close(master)
        return shown.decode()


def _read_to_end(master: int) -> Iterable[bytes]:
    try:
        while data := os.read(master, 4096):
            yield data
    except OSError:  # Linux reports the end of a terminal as EIO
        return


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine where all is there but the program."""
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("shell", "script"),
    [
        ("sh", "packaging/install.sh"),
        ("sh", "packaging/test.sh"),
        ("sh", "packaging/system_packages.sh"),
        ("bash", ".ci/run"),
    ],
)
def test_scripts_parse(shell: str, script: str) -> None:
    subprocess.run([shell, "-n", str(ROOT / script)], check=True)


def test_installs_with_the_pipx_that_is_there_and_asks_nothing(machine: Machine) -> None:
    done = machine.install()
    assert done.returncode == 0, done.stderr
    python = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    install, python_used, *_ = machine.calls
    assert install == f"pipx install --force {ROOT}"
    assert Path(python_used.removeprefix("with ")).resolve() == python
    assert "allmende-program --help" in machine.calls
    assert "Go on?" not in done.stdout
    assert "the dashboard\n" not in done.stdout
    assert "allmende start" in done.stdout
    assert f'export PATH="{machine.home}/.local/bin:$PATH"' in done.stdout


def test_says_what_it_will_do_and_how_to_undo_it_before_it_does(machine: Machine) -> None:
    output = machine.install().stdout
    undo = f"sh '{INSTALL}' --uninstall"
    assert output.index("This will") < output.index(undo) < output.index("Done.")


def test_second_run_stops_the_agent_and_replaces_the_program(machine: Machine) -> None:
    machine.install()
    (machine.home / "agent").touch()
    machine.calls_file.write_text("")
    done = machine.install()
    assert done.returncode == 0, done.stderr
    assert "stop the agent that runs" in done.stdout
    assert machine.calls[:2] == ["allmende-program stop", f"pipx install --force {ROOT}"]


def test_agent_that_does_not_stop_keeps_its_program(machine: Machine) -> None:
    machine.add("allmende-program", PROGRAM.replace('rm "$HOME/agent"', "exit 1"))
    machine.install()
    (machine.home / "agent").touch()
    machine.calls_file.write_text("")
    assert machine.install().returncode == 1
    assert machine.install("--uninstall").returncode == 1
    assert machine.calls == ["allmende-program stop"] * 2


@pytest.mark.parametrize("script", [None, "echo 3.11.1 /another"])
def test_program_whose_python_is_another_is_installed_anew(
    machine: Machine, script: str | None
) -> None:
    machine.install()
    python = machine.home / "venvs/allmende/bin/python"
    python.unlink()
    if script:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    assert machine.install().returncode == 0
    last_two = [c for c in machine.calls if "install" in c][-2:]
    assert last_two == ["pipx uninstall allmende", f"pipx install --force {ROOT}"]


def test_at_a_terminal_it_asks_once_and_starts_the_program(machine: Machine) -> None:
    screen = machine.install_at_terminal(b"\n")
    assert screen.count("Go on?") == 1
    assert screen.rstrip().endswith("the dashboard")


def test_at_a_terminal_no_changes_nothing(machine: Machine) -> None:
    screen = machine.install_at_terminal(b"n\n")
    assert "nothing was changed" in screen
    assert machine.calls == []
    assert list(machine.home.iterdir()) == []


def test_yes_and_no_start_are_obeyed_at_a_terminal(machine: Machine) -> None:
    screen = machine.install_at_terminal(b"", "--yes", "--no-start")
    assert "Go on?" not in screen
    assert "the dashboard\r\n" not in screen
    assert "Done." in screen


def test_without_root_missing_packages_are_named_and_nothing_is_changed(machine: Machine) -> None:
    machine.remove("gcc")
    machine.add("apt-get", "")
    done = machine.install()
    assert done.returncode == 1
    assert "apt-get install -y gcc libc6-dev libgmp-dev" in done.stderr
    assert machine.calls == []
    assert list(machine.home.iterdir()) == []


def test_root_installs_only_what_is_missing(machine: Machine) -> None:
    machine.add("id", "echo 0", is_recorded=False)
    machine.add("gcc", "while read -r line; do case $line in *gmp.h*) exit 1 ;; esac; done")
    machine.add("apt-get", "")
    assert machine.install().returncode == 0
    apt_calls = [call for call in machine.calls if call.startswith("apt-get")]
    assert apt_calls == [
        "apt-get update -q",
        "apt-get install -y -q --no-install-recommends libgmp-dev",
    ]


def test_sudo_is_used_where_there_is_one(machine: Machine) -> None:
    machine.remove("gcc")
    machine.add("apt-get", "", is_recorded=False)
    machine.add("sudo", "")
    assert machine.install().returncode == 0
    wanted = "sudo -n env DEBIAN_FRONTEND=noninteractive apt-get install"
    assert any(call.startswith(wanted) for call in machine.calls)


def test_failing_apt_stops_before_the_program(machine: Machine) -> None:
    machine.add("id", "echo 0", is_recorded=False)
    machine.remove("gcc")
    machine.add("apt-get", "exit 100")
    done = machine.install()
    assert done.returncode == 1
    assert "could not install gcc" in done.stderr
    assert not any(call.startswith("pipx install") for call in machine.calls)


def test_system_without_apt_is_told_what_to_install(machine: Machine) -> None:
    machine.remove("gcc")
    done = machine.install()
    assert done.returncode == 1
    assert "gmp-devel" in done.stderr


def test_old_pipx_is_not_used(machine: Machine) -> None:
    machine.add("pipx", "echo 1.1.0")
    machine.remove("gcc")  # stops before pipx is fetched
    assert f"put pipx into {machine.home}/.local/share" in machine.install().stdout


def test_unsupported_python_is_refused_with_the_remedy(machine: Machine) -> None:
    machine.add("python3", '[ "$1" = --version ] && echo "Python 3.10.9" || exit 1')
    done = machine.install()
    assert done.returncode == 1
    assert "needs Python 3.11, 3.12 or 3.13; found Python 3.10.9" in done.stderr


def test_shim_that_does_not_run_is_passed_over(machine: Machine) -> None:
    machine.add("python3", "exit 127")
    machine.add("python3.13", "exit 127")
    machine.add("python3.12", f'exec "{sys.executable}" "$@"', is_recorded=False)
    assert machine.install().returncode == 0


def test_full_disk_is_told_before_anything_is_fetched(machine: Machine) -> None:
    machine.add("df", 'echo header; echo "disk 100 1 204800 1% /"')
    done = machine.install()
    assert done.returncode == 1
    assert "GiB free" in done.stderr
    assert not any(call.startswith("pipx install") for call in machine.calls)


def test_failed_installation_says_what_to_do(machine: Machine) -> None:
    machine.add("pipx", PIPX.replace("  install*)", "  install*) exit 1"))
    done = machine.install()
    assert done.returncode == 1
    assert "run the same command again" in done.stderr


def test_unknown_flag_is_refused(machine: Machine) -> None:
    done = machine.install("--what")
    assert done.returncode == 2
    assert "Usage:" in done.stderr
    assert machine.calls == []


def test_uninstall_stops_the_agent_first_and_is_repeatable(machine: Machine) -> None:
    machine.install()
    (machine.home / "agent").touch()
    done = machine.install("--uninstall")
    assert done.returncode == 0, done.stderr
    assert machine.calls[-2:] == ["allmende-program stop", "pipx uninstall allmende"]
    assert not (machine.home / ".local/bin/allmende").exists()
    again = machine.install("--uninstall")
    assert again.returncode == 0
    assert "not installed" in again.stdout


def _installed_folder() -> Path | None:
    """Where `pip install .` put the package; None in a checkout that was not installed."""
    folder = Path(sysconfig.get_path("purelib"))
    return folder if (folder / "volunteer").is_dir() else None


def test_the_installed_package_is_what_is_tested() -> None:
    folder = _installed_folder()
    if folder is None:
        pytest.skip("the package is not installed here; nox's sessions install it")
    assert Path(str(volunteer.__file__)).is_relative_to(folder)


def test_the_installed_package_has_every_file() -> None:
    if _installed_folder() is None:
        pytest.skip("the package is not installed here; nox's sessions install it")
    installed = {str(file) for file in importlib.metadata.files("allmende") or ()}
    listing = subprocess.run(
        ["git", "ls-files", "volunteer", "tui", "p2p"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    committed = set(listing.stdout.splitlines())
    assert committed
    assert committed <= installed
