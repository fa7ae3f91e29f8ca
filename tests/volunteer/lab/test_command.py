"""`python -m volunteer.lab.training`, called in this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.volunteer.lab.tiny import arm_of, tiny_task
from volunteer.lab.training import __main__ as command
from volunteer.lab.training import about, catalogue, report, tables
from volunteer.lab.training.catalogue import ENTRIES
from volunteer.lab.training.experiment import Entry, Experiment, at_most
from volunteer.lab.training.plots import can_plot
from volunteer.lab.training.report import LabReport, Listed
from volunteer.lab.training.strategies.data_parallel import DataParallelPlan
from volunteer.lab.training.strategies.diloco import DiLoCoPlan

pytestmark = pytest.mark.slow


def make(num_steps: int) -> Experiment:
    task = tiny_task(num_steps)
    return Experiment(
        name="tiny",
        title="two ways to train",
        arms=(
            arm_of(DataParallelPlan(num_workers=1), task, name="alone"),
            arm_of(DiLoCoPlan(num_workers=2, steps_a_round=2), task, name="together"),
        ),
        reference="alone",
        judge=lambda outcomes: (at_most(outcomes, "together", over="alone", percent=50.0),),
        papers=("A paper",),
        remarks=("What else there is to say.",),
    )


@pytest.fixture(autouse=True)
def tiny_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Entry(name="tiny", title="two ways to train", make=make, num_steps=4, minutes_a_seed=1)
    monkeypatch.setattr(catalogue, "ENTRIES", (entry,))
    monkeypatch.setattr(command, "lower_priority", lambda niceness: None)


def run(folder: Path, *flags: str) -> int:
    return command.main(["run", "tiny", "--out", str(folder), "--seeds", "2", *flags])


def test_a_folder_that_cannot_be_made_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").write_text("a file")
    assert run(tmp_path / "taken") == 1
    assert capsys.readouterr().err.startswith("allmende: [Errno 17] File exists")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's death")
@pytest.mark.timeout(60)
def test_the_lab_ends_with_the_command_that_was_killed(tmp_path: Path) -> None:
    lab = [sys.executable, "-P", "-m", "volunteer.lab.training", "run", "acceptance-7"]
    parent = (
        "import subprocess, sys\n"
        "subprocess.Popen(sys.argv[1:], start_new_session=True, stderr=subprocess.STDOUT)\n"
        "sys.stdin.read()\n"
    )
    command_line = [sys.executable, "-c", parent, *lab, "--out", str(tmp_path), "--minutes", "2"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command_line, stdin=pipe, stdout=pipe) as started:
        assert started.stdout is not None
        assert b"step 0" in started.stdout.readline()
        started.kill()
        assert b"interrupted" in started.stdout.read()  # to the end: the lab holds it as well


def test_a_run_leaves_points_a_table_and_what_computed_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    out, err = capsys.readouterr()
    table = (tmp_path / tables.TABLE_NAME).read_text()
    assert out == table
    assert table.startswith("# tiny: two ways to train\n")
    assert "| together against alone | at most +50 % |" in table
    assert "A paper" in table
    assert "What else there is to say." in table
    assert "- Seeds: 0, 1.\n" in table
    assert f"allmende lab run tiny --out {tmp_path} --seeds 2" in table
    assert "together, seed 1: step 4 of 4, loss " in err
    (told,) = about.read_runs(tmp_path)
    assert (told.end, told.threads) == ("finished", 1)
    assert (tmp_path / report.PLOT_NAME).exists() == can_plot()


def test_json_says_the_same_and_table_says_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--json", "--steps", "6")
    said = capsys.readouterr().out
    told = msgspec.json.decode(said, type=LabReport)
    assert [arm.name for arm in told.arms] == ["alone", "together"]
    assert [arm.seeds for arm in told.arms] == [(0, 1), (0, 1)]
    assert told.arms[1].tokens == 2 * 6 * 2 * 8
    assert told.verdicts[0].is_met is None  # two seeds are too few
    assert command.main(["table", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out == said


def test_a_budget_that_is_spent_is_said_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--minutes", "0.0000001") == 1
    assert "The budget is used up" in capsys.readouterr().err
    assert [one.end for one in about.read_runs(tmp_path)] == ["budget spent"]
    assert run(tmp_path) == 0


def test_ctrl_c_keeps_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(text: str) -> None:
        if "together" in text:
            raise KeyboardInterrupt
        said.append(text)

    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(command, "_say", interrupted)
        with pytest.raises(KeyboardInterrupt):
            command._obey(
                command._parser().parse_args(["run", "tiny", "--out", str(tmp_path)]), "command"
            )
    assert [one.end for one in about.read_runs(tmp_path)] == ["interrupted"]
    assert run(tmp_path) == 0
    assert "alone, seed 0" not in capsys.readouterr().err  # it was finished


def test_mistakes_are_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "tinny", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "allmende: no experiment is called 'tinny'; there are tiny\n"
    assert command.main(["table", str(tmp_path)]) == 1
    assert "no arm of an experiment is finished there" in capsys.readouterr().err


def test_acceptance_tests_are_listed_by_their_numbers() -> None:
    numbers = [int(e.name.split("-")[1]) for e in ENTRIES if e.name.startswith("acceptance-")]
    assert numbers == [7, 8, 9, 10, 11, 12]


def test_one_seed_has_no_deviation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--seeds", "1") == 0
    assert "±" not in capsys.readouterr().out
    assert run(tmp_path) == 0
    assert "±" in capsys.readouterr().out


def test_a_line_of_runs_that_was_cut_short_spoils_no_other(tmp_path: Path) -> None:
    assert run(tmp_path, "--seeds", "1") == 0
    file = tmp_path / about.RUNS_NAME
    file.write_bytes(file.read_bytes() + file.read_bytes()[:40])
    assert run(tmp_path) == 0
    assert [one.end for one in about.read_runs(tmp_path)] == ["finished", "finished"]


def test_every_experiment_is_listed_and_can_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list", "--json"]) == 0
    listed = msgspec.json.decode(capsys.readouterr().out, type=list[Listed])
    assert "opendiloco" in {one.name for one in listed}
    assert command.main(["list"]) == 0
    text = capsys.readouterr().out
    assert all(f"{one.name}: {one.title}; " in text for one in listed)
    assert all(f"'{name}'" in text for one in listed for name in one.arms)
    for entry in ENTRIES:
        experiment = entry.make(entry.num_steps)
        names = [arm.name for arm in experiment.arms]
        assert len(set(names)) == len(names)
        assert experiment.reference in names
        assert experiment.name == entry.name
        assert all(len(arm.papers) in (0, len(experiment.papers)) for arm in experiment.arms)
