"""`allmende lab simulate` as a process of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.tui.command_line import run

pytestmark = pytest.mark.slow

WITHOUT_HASH_CHECK = """
from volunteer.lab.simulation.files import Files
Files._compute_state = lambda self, action: self._hold_state(action.commit_id, "another")
from tui.cli import main
main()
"""


def simulate(
    home: Path, flags: str, *, code: str | None = None
) -> subprocess.CompletedProcess[str]:
    return run(home, "lab", "simulate", *flags.split(), code=code)


def test_a_table_is_printed_with_what_all_seeds_show(home: Path) -> None:
    result = simulate(home, "--peers 5 --rounds 6 --seeds 2 --faults loss,crashes")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "5 peers, 6 rounds; faults: crashes, loss"
    rows = [line.split() for line in lines if line.lstrip()[:1].isdigit()][1:]
    assert [row[0] for row in rows] == ["0", "1"]
    assert all(float(row[2]) > 0.7 for row in rows)
    assert "all invariants held" in lines[-1]
    assert not list(home.iterdir()), "an experiment leaves nothing behind"


def test_the_same_seed_is_the_same_run(home: Path) -> None:
    one, other = (simulate(home, "--peers 4 --rounds 5 --seed 7 --json") for _ in range(2))
    assert one.stdout == other.stdout
    said = msgspec.json.decode(one.stdout)
    assert (said["peers"], said["rounds"]) == (4, 5)
    assert "spam" in said["faults"]
    assert [result["seed"] for result in said["seeds"]] == [7]
    assert said["seeds"][0]["broken"] == ""
    assert said["seeds"][0]["bytes_per_peer_round"]["contribution"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--faults lost", "no fault is called 'lost'; did you mean loss?"),
        ("--faults ,", "name at least one fault"),
        ("--peers 0", "greater than or equal to 1"),
        ("--rounds 0", "greater than or equal to 1"),
        ("--seeds 0", "greater than or equal to 1"),
        ("--seed -1", "greater than or equal to 0"),
    ],
)
def test_bad_flags_are_bad_usage(home: Path, args: str, message: str) -> None:
    result = simulate(home, args)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())


def test_a_broken_invariant_is_named_with_its_seed(home: Path) -> None:
    flags = "--peers 4 --rounds 3 --seed 3 --faults none"
    result = simulate(home, flags, code=WITHOUT_HASH_CHECK)
    assert result.returncode == 1
    assert "   3  BROKEN in round" in result.stdout
    assert "stands on another state" in result.stdout
    assert result.stdout.splitlines()[-1] == "invariants are broken by seed 3"


def test_help_does_not_import_the_simulation(home: Path) -> None:
    code = (
        "import sys; from tui import cli;"
        "print([m for m in sys.modules if m.startswith('volunteer.lab')])"
    )
    assert run(home, code=code).stdout == "[]\n"
