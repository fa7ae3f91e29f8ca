"""Every filter of a commit: what becomes of each role, alone and in processes that differ."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.volunteer.training.filtered_commit import ROLES, Report, apply, filtered_spec
from volunteer.messages import Outcome
from volunteer.rounds.exclusion import max_struck
from volunteer.training.weighing import COPY_REASON, EXCLUDED_REASON, STALE_REASON

REPOSITORY = Path(__file__).parents[3]
SETTINGS = {
    "two threads": (1, 2, {}),
    "three threads": (2, 3, {}),
    "plain kernels": (3, 1, {"ATEN_CPU_CAPABILITY": "default"}),
}


@pytest.fixture(scope="module")
def report() -> Report:
    return apply(filtered_spec(), arrival=0)


def outcome_of(report: Report, role: str) -> Outcome:
    return report.outcomes[ROLES.index(role)]


def test_each_role_is_found_for_what_it_is(report: Report) -> None:
    reasons = {
        "opposed": "its direction disagrees with the others' (cosine -",
        "noise": "it cannot be told from noise",
        "stale": STALE_REASON,
        "excluded": EXCLUDED_REASON,
        "copy": COPY_REASON,
    }
    for role, reason in reasons.items():
        outcome = outcome_of(report, role)
        assert outcome.refused_reason.startswith(reason), role
        assert outcome.weight == 0.0, role
    kept = [outcome for outcome in report.outcomes if not outcome.refused_reason]
    assert len(kept) == len(ROLES) - len(reasons)
    assert math.fsum(outcome.weight for outcome in kept) == pytest.approx(1.0, abs=1e-12)


def test_marked_are_the_worst_up_to_a_quarter_and_never_the_excluded(report: Report) -> None:
    marked = {
        role for role, outcome in zip(ROLES, report.outcomes, strict=True) if outcome.is_marked
    }
    assert max_struck(len(ROLES) - 1) == 3
    assert marked == {"stale", "opposed", "noise"}


def test_those_of_one_direction_share_one_weight(report: Report) -> None:
    twin, other = outcome_of(report, "twin"), outcome_of(report, "other twin")
    assert (twin.copies, other.copies) == ((other.contribution_id,), (twin.contribution_id,))
    honest = outcome_of(report, "honest")
    assert twin.weight + other.weight == pytest.approx(honest.weight, rel=0.02)
    original = outcome_of(report, "original")
    assert original.weight == pytest.approx(honest.weight, rel=0.02), "its copy has no part"
    assert honest.copies == ()


def test_long_ones_are_clipped_and_carried_work_less(report: Report) -> None:
    assert outcome_of(report, "honest").clip_scale == pytest.approx(1.0, abs=0.01)
    assert outcome_of(report, "long").clip_scale == pytest.approx(1 / 5, rel=0.05)
    assert outcome_of(report, "carrier").clip_scale == pytest.approx(3 / 5, rel=0.05)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", SETTINGS)
def test_arrival_restarts_threads_and_kernels_change_nothing(report: Report, name: str) -> None:
    arrival, threads, environment = SETTINGS[name]
    command = [sys.executable, "-m", "tests.volunteer.training.filtered_commit"]
    finished = subprocess.run(
        [*command, "--arrival", str(arrival), "--threads", str(threads)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
    )
    other = msgspec.json.decode(finished.stdout, type=Report)
    assert other.num_threads == threads
    assert (other.kernels == "DEFAULT") is bool(environment)
    assert other.outcomes == report.outcomes
    assert other.state_hash == report.state_hash
    assert other.trimmed_hash == report.trimmed_hash != report.state_hash
