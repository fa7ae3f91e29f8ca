"""The lab as a real process: killed at random, on a full disk, on one that cannot be written."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from volunteer.lab.training import about, report, tables
from volunteer.lab.training.results import POINTS_NAME

pytestmark = [pytest.mark.full, pytest.mark.system, pytest.mark.timeout(180)]
NUM_KILLS = 3
NUM_LINES = 6 * 6
"""That a whole run says: a point each of six arms."""
LAB = """
import resource, sys
from tests.volunteer.lab.test_runner import tiny_experiment
from volunteer.lab.training import __main__ as command, catalogue
from volunteer.lab.training.experiment import Entry
catalogue.ENTRIES = (
    Entry(name="tiny", title="two ways", make=tiny_experiment, num_steps=20, minutes_a_seed=1),
)
if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
sys.exit(command.main(["run", "tiny", "--seeds", "3", "--out", sys.argv[1]]))
"""


def lab(folder: Path, *, max_file_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    limit = [] if max_file_bytes is None else [str(max_file_bytes)]
    argv = [sys.executable, "-c", LAB, str(folder), *limit]
    return subprocess.run(argv, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    done = lab(folder)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == NUM_LINES
    return folder


def test_kills_at_random_moments_end_with_the_same_points(whole: Path, tmp_path: Path) -> None:
    for _ in range(NUM_KILLS):
        num_lines = random.randint(1, NUM_LINES // NUM_KILLS)
        argv = [sys.executable, "-c", LAB, str(tmp_path)]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            assert process.stderr is not None
            for _ in range(num_lines):
                assert process.stderr.readline()
            process.kill()
        assert process.returncode == -signal.SIGKILL
    done = lab(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / POINTS_NAME).read_bytes() == (whole / POINTS_NAME).read_bytes()


@pytest.mark.parametrize("max_file_bytes", [0, 100, 1000, 1500])
def test_a_disk_that_is_full_ends_it_and_what_is_finished_stands(
    max_file_bytes: int, whole: Path, tmp_path: Path
) -> None:
    done = lab(tmp_path, max_file_bytes=max_file_bytes)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith("allmende: ")
    assert "Traceback" not in done.stderr
    written = tmp_path / POINTS_NAME
    kept = written.read_bytes() if written.exists() else b""
    assert len(kept) <= max_file_bytes
    again = lab(tmp_path)
    assert again.returncode == 0, again.stderr
    assert written.read_bytes() == (whole / POINTS_NAME).read_bytes()
    assert written.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1])
    assert [one.end for one in about.read_runs(tmp_path)][-1] == "finished"


@pytest.mark.skipif(sys.platform != "linux", reason="mounts of one's own are Linux's")
def test_a_folder_that_cannot_be_written_is_told_and_its_results_stand(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "results"
    shutil.copytree(whole, folder)
    unfinished = (folder / POINTS_NAME).read_bytes().splitlines(keepends=True)[:-3]
    (folder / POINTS_NAME).write_bytes(b"".join(unfinished))
    names = (POINTS_NAME, about.RUNS_NAME, tables.TABLE_NAME, report.PLOT_NAME)
    before = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$1" -c "$2" "$0"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, str(folder), sys.executable, LAB],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    first, *_ = done.stderr.splitlines()
    assert first.startswith("allmende: ")
    assert "Read-only file system" in first
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert lab(folder).returncode == 0
    assert (folder / POINTS_NAME).read_bytes() == (whole / POINTS_NAME).read_bytes()
