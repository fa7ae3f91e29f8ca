"""What became of each contribution, in words and as JSON."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.fakes.fake_agent import FakeAgent, make_contributions
from tests.tui.command_line import run
from tui.contributions import contribution_table, how_it_came
from volunteer.answers import ContributionPoint


def test_every_end_is_told_with_its_reason() -> None:
    assert [how_it_came(point) for point in make_contributions()] == [
        "listed in round 1",
        "carried by …00000002",
        "listed in round 3",
        "listed in round 4; it points against the others",
        "its blob is no longer on this disk",
        "carried by …00000006",
        "",
    ]
    head, *rows = contribution_table(make_contributions())
    assert head == ("Contribution", "Made in round", "New work", "What became of it", "How")
    assert [row[3] for row in rows][3:] == [
        "refused",
        "dropped",
        *2 * ["sent, not final yet"],
    ]


def test_what_an_agent_says_is_made_harmless() -> None:
    point = msgspec.structs.replace(
        make_contributions()[4], outcome="new\x1b[2J", reason="\x1b]0;title\x07 gone"
    )
    assert "\x1b" not in "".join(contribution_table([point])[1])


@pytest.mark.slow
def test_the_verb_prints_words_or_json(home: Path, fake: FakeAgent) -> None:
    words = run(home, "stats", "--contributions", "5").stdout.splitlines()
    assert len(words) == 6
    assert "its blob is no longer on this disk" in words[3]
    as_json = run(home, "stats", "--contributions", "100", "--json").stdout
    assert msgspec.json.decode(as_json, type=list[ContributionPoint]) == make_contributions()
    assert [r.args for r in fake.requests] == [{"limit": 5}, {"limit": 100}]
    fake.contributions = []
    nothing = run(home, "stats", "--contributions", "5").stdout
    assert nothing == "Nothing has been contributed to this run yet.\n"
