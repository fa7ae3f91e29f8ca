"""Peers that speak another version of the protocol: said in words, with what to do."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import msgspec
import pytest

from tests.fakes.fake_agent import FakeAgent, make_peers, make_status
from tests.tui.conftest import main_screen, make_app, text_of, wait_text
from tui.peers_answer import UPDATE, peers_answer, protocol_note
from tui.view_state import status_lines
from tui.widgets.rows import Text
from volunteer.locations import Locations

NOTE = f"2 peers speak protocol 2, this is 1: {UPDATE}."
LONELY = make_status(protocol="1.0", differing_peers={"2": 2}, num_peers=0)


@pytest.mark.parametrize(
    ("differing", "words"),
    [
        ({}, ""),
        ({"2": 2}, f"2 peers speak protocol 2, this is 1: {UPDATE}."),
        ({"3": 1}, f"1 peer speaks protocol 3, this is 1: {UPDATE}."),
        (
            {"2": 1, "10": 4},
            f"4 peers speak protocol 10 and 1 peer speaks protocol 2, this is 1: {UPDATE}.",
        ),
    ],
)
def test_newer_peers_ask_for_an_update(differing: dict[str, int], words: str) -> None:
    assert protocol_note(make_status(protocol="1.0", differing_peers=differing)) == words


def test_older_peers_have_to_be_updated_themselves() -> None:
    note = protocol_note(make_status(protocol="2.4", differing_peers={"1": 2}))
    assert note == "2 peers speak protocol 1, this is 2: they have to be updated."


def test_the_command_line_says_it_below_the_peers_or_instead_of_them() -> None:
    assert peers_answer([], LONELY) == (NOTE,)
    assert peers_answer([], make_status())[0].startswith("No peers.")
    with_peers = peers_answer(make_peers(), LONELY)
    assert with_peers == (*peers_answer(make_peers(), make_status()), NOTE)
    assert len(with_peers) == 5


def test_who_is_excluded_is_told_with_the_reason_and_the_end() -> None:
    first, *rest = make_peers()
    excluded = msgspec.structs.replace(first, excluded_until_round=60)
    (note,) = peers_answer([excluded, *rest], make_status())[len(make_peers()) + 1 :]
    assert note == (
        f"{first.peer_id} is excluded through round 60: its work was found bad twice, and has no"
        " weight."
    )
    lines = status_lines(make_status(excluded_until_round=60), datetime.now(UTC))
    assert "  Excluded       our work has no weight through round 60: found bad twice" in lines
    assert not [
        line for line in status_lines(make_status(), datetime.now(UTC)) if "xcluded" in line
    ]


async def test_the_peers_screen_says_it_above_the_peers(
    agent: FakeAgent, locations: Locations
) -> None:
    agent.status = msgspec.structs.replace(LONELY, num_peers=3)
    app = make_app(locations)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("2")
        await wait_text(pilot, app, "#protocol-note", "2 peers speak protocol 2, this is 1: update")
        assert "…00000001  out" in text_of(app, "#all-peers")
        main_screen(app).show(dataclasses.replace(app._feed.snapshot, status=make_status()))
        assert not main_screen(app).query_one("#protocol-note", Text).display


async def test_alone_among_newer_ones_it_says_so_instead_of_nobody(
    agent: FakeAgent, locations: Locations
) -> None:
    agent.status, agent.peers = LONELY, []
    app = make_app(locations)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_text(pilot, app, "#some-peers", "2 peers speak protocol 2, this is 1: update")
        await pilot.press("2")
        await wait_text(pilot, app, "#all-peers", "2 peers speak protocol 2, this is 1: update")
        assert not main_screen(app).query_one("#protocol-note", Text).display
