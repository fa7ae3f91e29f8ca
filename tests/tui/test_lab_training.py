"""`allmende lab run|reproduce|table|list|presets`: what is passed on, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tests.tui.command_line import ROOT, run
from tui import lab_training
from tui.lab import lab_app

ECHO = (sys.executable, "-c", "import sys; print(sys.argv[1:])")
WAITING = """
import sys
from tui import lab_training
child = "import signal, sys; print('up', flush=True); signal.sigwait({15}); sys.exit(130)"
block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {15}); "
lab_training.LAB_COMMAND = (sys.executable, "-c", block + child)
from tui.cli import main
main()
"""


def passed_on(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str
) -> str:
    monkeypatch.setattr(lab_training, "LAB_COMMAND", ECHO)
    monkeypatch.setattr(signal, "signal", lambda number, handler: handler)
    result = CliRunner().invoke(lab_app, args)
    assert result.exit_code == 0, result.output
    return capfd.readouterr().out.strip()


def test_options_reach_the_process(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    said = passed_on(
        capfd, monkeypatch, "run", "acceptance-7", "--minutes", "2.5", "--arm", "a b", "--json"
    )
    folder = str(tmp_path / "lab-results" / "acceptance-7")
    wanted = ["run", "acceptance-7", "--seeds", "3", "--first-seed", "0", "--minutes", "2.5"]
    assert said == str([*wanted, "--arm", "a b", "--threads", "1", "--out", folder, "--json"])
    said = passed_on(capfd, monkeypatch, "reproduce", "opendiloco", "--steps", "50", "--out", "x")
    assert said.startswith("['run', 'opendiloco', '--seeds', '3'")
    assert f"'--steps', '50', '--threads', '1', '--out', '{tmp_path / 'x'}'" in said
    assert passed_on(capfd, monkeypatch, "table", "x") == str(["table", str(tmp_path / "x")])
    assert passed_on(capfd, monkeypatch, "list", "--json") == "['list', '--json']"


def test_the_status_of_the_process_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_training, "LAB_COMMAND", (sys.executable, "-c", "raise SystemExit(1)"))
    monkeypatch.setattr(signal, "signal", lambda number, handler: handler)
    assert CliRunner().invoke(lab_app, ["list"]).exit_code == 1


def test_presets_are_a_table() -> None:
    result = CliRunner().invoke(lab_app, ["presets"])
    lines = result.output.splitlines()
    assert lines[0].split()[:2] == ["name", "parameters"]
    assert any(line.startswith("opendiloco-150m") for line in lines)
    told = msgspec.json.decode(CliRunner().invoke(lab_app, ["presets", "--json"]).output)
    assert len(told) == len(lines) - 3
    assert told[0]["num_parameters"] > 0


@pytest.mark.slow
def test_ctrl_c_ends_the_process_first(home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, "lab", "list"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "ALLMENDE_HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=15)
    assert process.returncode == 130, err
    assert b"Traceback" not in err


@pytest.mark.slow
def test_the_real_process_lists_its_experiments(home: Path) -> None:
    result = run(home, "lab", "list")
    assert result.returncode == 0, result.stderr
    assert any(line.startswith("opendiloco: ") for line in result.stdout.splitlines())
