"""An hour of four agents and a kill a minute leaves nothing behind (soak.py has the script)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.soak import NUM_AGENTS, Figures, Sample, problems_of, soak
from tests.system.swarms import report

pytestmark = [pytest.mark.system]
FLAT = Figures(100e6, 800e6, 30, 8, 5e6)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(4500)
def test_an_hour_with_a_kill_a_minute_is_flat(tmp_path: Path) -> None:
    assert soak(tmp_path, 3600.0, report) == []


def hour(last: Figures) -> list[Sample]:
    """Return samples of an hour in which the last agent goes from FLAT to `last`, evenly."""
    samples = []
    for number in range(121):
        grown = [a + (b - a) * number / 120 for a, b in zip(FLAT, last, strict=True)]
        figures: list[Figures | None] = [FLAT] * (NUM_AGENTS - 1)
        samples.append(Sample(30.0 * number, 4 * number, 1, [*figures, Figures(*grown)]))
    return samples


def test_the_verdict_tells_flat_from_growing() -> None:
    assert problems_of(hour(FLAT), 3600.0) == []
    for name, most in [
        ("agent_rss_bytes", 140e6),
        ("children_rss_bytes", 1100e6),
        ("fds", 60),
        ("threads", 30),
        ("disk_bytes", 100e6),
    ]:
        (problem,) = problems_of(hour(FLAT._replace(**{name: most})), 3600.0)
        assert problem.startswith(f"v{NUM_AGENTS - 1} ")
    assert problems_of(hour(FLAT)[:2], 3600.0) == ["too short for a verdict"]
    still = [sample._replace(round_index=5) for sample in hour(FLAT)]
    assert problems_of(still, 3600.0) == ["no round was committed"]
