"""The install and test commands, on machines made of stubs; and what the built package contains.

The real installation is nox's `install` session: it takes a minute and the network.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import volunteer
from tests.fakes.installer_machine import INSTALL, PIPX, ROOT, Machine

pytestmark = pytest.mark.slow


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
    plan = screen[: screen.index("Go on?")]
    assert "open the dashboard at the end; it says what it uses, and starts when you agree" in plan
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
    assert "Nothing contributes before you start it." in screen


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


def test_unknown_flag_is_refused_by_name(machine: Machine) -> None:
    done = machine.install("--yes", "--bogus")
    assert done.returncode == 2
    assert done.stderr.startswith("allmende: unknown option: --bogus\nUsage:")
    assert machine.calls == []


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
