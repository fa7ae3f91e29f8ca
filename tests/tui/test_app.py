"""The view against the fake agent: what it shows, what its keys do, and what it says at the end."""

from __future__ import annotations

import pytest
from textual import events
from textual.widgets import ContentSwitcher

from tests.fakes.fake_agent import FakeAgent, make_peers, make_stats, make_status
from tests.tui.conftest import (
    main_screen,
    make_app,
    shows,
    text_of,
    verbs,
    wait_text,
    wait_until,
)
from tui.app import AllmendeApp
from tui.screens.dialogs import HelpDialog
from tui.view_state import Link
from tui.wording import NOT_YET
from volunteer.answers import Status
from volunteer.locations import Locations
from volunteer.messages import CONTROL_VERSION, ControlFault

pytestmark = pytest.mark.slow


async def test_it_says_connecting_before_the_first_status(
    agent: FakeAgent, locations: Locations
) -> None:
    agent.silent_verbs.add("watch")
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: "watch" in verbs(agent))
        assert text_of(app, "#headline").startswith("◔ Connecting")
        assert text_of(app, "#speed") == ""
        assert text_of(app, "#totals") == ""


async def test_the_dashboard_shows_what_the_agent_says(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#totals", "13:57:10")
        assert text_of(app, "#headline").splitlines() == [
            "● Contributing",
            "Nobody uses this machine.",
            "Training on cuda:0, inner step 3100; 527k tokens not sent yet.",
        ]
        assert text_of(app, "#round").startswith("Round 12  ━")
        assert text_of(app, "#round").endswith("4:10 of 10:00")
        assert "…00000001  out" in text_of(app, "#some-peers")
        assert "as of" not in text_of(app, "#title")


async def test_a_new_status_is_shown_without_being_asked_for(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await agent.push(
            state="waiting", reason="The battery is used.", resumes_when="it is on mains power"
        )
        await wait_text(pilot, app, "#headline", "○ Waiting\nThe battery is used.")
        assert "It resumes when it is on mains power." in text_of(app, "#headline")


async def test_many_statuses_a_second_are_drawn_once(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#totals", "13:57:10")
        shown = text_of(app, "#headline")
        app._drawn_at = float("inf")
        for step in range(50):
            await agent.push(inner_step=4000 + step)
        await wait_until(pilot, lambda: _step(app) == 4049)
        assert text_of(app, "#headline") == shown


def _step(app: AllmendeApp) -> int:
    status = app._feed.snapshot.status
    return status.inner_step if status else -1


async def test_a_new_round_brings_its_point_to_the_curve(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#totals", "13:57:10")
        before = verbs(agent).count("history")
        await agent.push(inner_step=1)
        await agent.push(tip="c13", round_index=13)
        await wait_until(pilot, lambda: verbs(agent).count("history") == before + 1)


async def test_starting_shows_what_the_agent_does(agent: FakeAgent, locations: Locations) -> None:
    agent.status = Status(state="starting", reason="Checking the last checkpoint.", resumes_when="")
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Starting\nChecking the last checkpoint.")
        assert text_of(app, "#speed").count(NOT_YET) == 4
        assert text_of(app, "#round").endswith(NOT_YET)


@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
async def test_closing_the_view_stops_nothing_and_says_so(
    agent: FakeAgent, locations: Locations, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await pilot.press(key)
    app._print_error_renderables()
    assert "goes on in the background" in capsys.readouterr().err
    assert "stop" not in verbs(agent)


async def test_when_the_agent_goes_the_last_values_stay_with_their_time(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#totals", "13:57:10")
        await agent.close()
        await wait_text(pilot, app, "#headline", "■ Not running\nThe agent has gone")
        assert "Press s to start it." in text_of(app, "#headline")
        assert "as of 14:03:22" in text_of(app, "#title")
        assert "12.4M tokens" in text_of(app, "#totals")
        assert main_screen(app).query_one("#tabs").has_class("-old")
        assert app.check_action("start_agent", ())
        assert not app.check_action("pause", ())


async def test_an_agent_that_begins_anew_is_not_called_gone_unless_it_stays_away(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#totals", "13:57:10")
        reason = "The agent begins anew, without loss."
        await agent.push(state="starting", reason=reason, is_restarting=True)
        await wait_text(pilot, app, "#headline", reason)
        await agent.close()
        await wait_text(pilot, app, "#headline", f"No answer\n{reason} It is on its way.")
        await wait_text(pilot, app, "#headline", "The agent has gone")


async def test_an_agent_that_comes_back_is_followed_again(locations: Locations) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "No agent is running")
        async with FakeAgent(locations.control_socket):
            await wait_text(pilot, app, "#headline", "● Contributing")
            assert not main_screen(app).query_one("#tabs").has_class("-old")
        await wait_text(pilot, app, "#headline", "The agent has gone")


async def test_a_slow_agent_is_called_silent_not_gone(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations, silent_after_s=0.05)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "! No answer\nNo status since 14:03:22.")
        assert app._feed.snapshot.link is Link.SILENT
        await agent.push(round_index=13)
        await wait_until(pilot, lambda: agent.num_watchers == 1)
        await wait_text(pilot, app, "#round", "Round 13")


async def test_an_agent_that_hangs_from_the_start_is_silent_and_can_be_paused(
    agent: FakeAgent, locations: Locations
) -> None:
    agent.silent_verbs |= {"status", "watch"}
    app = make_app(locations, start_if_none=True, request_deadline_s=0.05)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "! No answer\nIt has not said anything yet.")
        assert app.check_action("pause", ())


async def test_garbage_is_told_and_survived(agent: FakeAgent, locations: Locations) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        agent.raw_replies["watch"] = b"\x00 more garbage\n"
        await agent.push_raw(b'{"version":1,"result":[]}\n')
        await wait_text(pilot, app, "#headline", "! Not understood")
        assert "allmende stop" in text_of(app, "#headline")
        del agent.raw_replies["watch"]
        await wait_text(pilot, app, "#headline", "● Contributing")


async def test_another_version_is_told_in_words(agent: FakeAgent, locations: Locations) -> None:
    agent.version = CONTROL_VERSION + 1
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "the agent speaks control version 2")


async def test_a_table_that_cannot_be_had_does_not_hide_the_rest(
    agent: FakeAgent, locations: Locations
) -> None:
    agent.faults["peers"] = ControlFault(message="the swarm is not up")
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: bool(app._feed.snapshot.problem))
        await agent.push(state="catching_up")
        await wait_text(pilot, app, "#some-peers", "Peers: the swarm is not up")
        assert text_of(app, "#headline").startswith("» Catching up")


async def test_markup_from_a_peer_is_text(agent: FakeAgent, locations: Locations) -> None:
    agent.status = make_status(reason="[bold]x[/nonsense] [@click=app.bell]y[/].", run_name="[red]")
    agent.peers = make_peers(1)
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "[bold]x[/nonsense] [@click=app.bell]y[/]")
        assert "[red]" in text_of(app, "#title")


async def test_tabs(agent: FakeAgent, locations: Locations) -> None:
    agent.peers = make_peers(9)
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#some-peers", "and 4 more: press 2")
        tabs = main_screen(app).query_one(ContentSwitcher)
        for key, tab in (("2", "peers"), ("3", "stats"), ("1", "dashboard"), ("tab", "peers"),
                         ("shift+tab", "dashboard"), ("shift+tab", "stats")):  # fmt: skip
            await pilot.press(key)
            assert tabs.current == tab
        await wait_text(pilot, app, "#gift", "Rounds confirmed")
        assert "39.8 MB" in text_of(app, "#traffic")
        await pilot.press("2")
        await wait_text(pilot, app, "#all-peers", "…00000008")


async def test_help(agent: FakeAgent, locations: Locations) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: "watch" in verbs(agent))
        await pilot.press("question_mark")
        await wait_until(pilot, shows(app, HelpDialog))
        await pilot.press("escape")
        await wait_until(pilot, lambda: not shows(app, HelpDialog)())


async def test_out_of_focus_nothing_is_asked_and_little_is_drawn(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#totals", "13:57:10")
        app.post_message(events.AppBlur())
        await wait_until(pilot, lambda: not app._feed._is_visible)
        asked = len(agent.requests)
        shown = text_of(app, "#headline")
        for step in range(20):
            await agent.push(inner_step=5000 + step, tip="c99")
        await wait_until(pilot, lambda: _step(app) == 5019)
        assert (len(agent.requests), text_of(app, "#headline")) == (asked, shown)
        app.post_message(events.AppFocus())
        await wait_text(pilot, app, "#headline", "inner step 5019")


async def test_out_of_focus_a_gone_agent_is_not_looked_for(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        app.post_message(events.AppBlur())
        await wait_until(pilot, lambda: not app._feed._is_visible)
        await agent.close()
        await wait_text(pilot, app, "#headline", "The agent has gone")
        async with FakeAgent(locations.control_socket) as second:
            app.post_message(events.AppFocus())
            await wait_text(pilot, app, "#headline", "● Contributing")
            assert "watch" in verbs(second)


@pytest.mark.parametrize(
    ("size", "is_usable"), [((40, 8), True), ((39, 24), False), ((80, 7), False)]
)
async def test_too_small_is_said(
    agent: FakeAgent, locations: Locations, size: tuple[int, int], is_usable: bool
) -> None:
    del agent
    app = make_app(locations)
    async with app.run_test(size=size) as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        screen = main_screen(app)
        assert screen.query_one("#headline").display is is_usable
        assert screen.query_one("#too-small").display is not is_usable
        assert text_of(app, "#too-small") == (
            "● Contributing. The window is too small: 40 x 8 needed."
        )


async def test_a_resize_lays_the_bar_out_again(agent: FakeAgent, locations: Locations) -> None:
    del agent
    app = make_app(locations)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: len(text_of(app, "#round")) == 78)
        await pilot.resize_terminal(120, 40)
        await wait_until(pilot, lambda: len(text_of(app, "#round")) == 118)


@pytest.mark.parametrize("state", ["contributing", "paused"])
async def test_the_narrow_footer_is_whole(
    agent: FakeAgent, locations: Locations, state: str
) -> None:
    agent.status = make_status(state=state)
    app = make_app(locations)
    async with app.run_test(size=(40, 10)) as pilot:
        await wait_text(pilot, app, "#headline", state.capitalize())
        verb = "Resume" if state == "paused" else "Pause"
        await wait_until(pilot, lambda: verb in _last_line(app))
        assert _last_line(app) == f"p {verb} q Close view Q Stop ? Help"


def _last_line(app: AllmendeApp) -> str:
    return app.screen._compositor.render_strips()[-1].text.strip()


async def test_what_is_not_measured_is_not_yet(agent: FakeAgent, locations: Locations) -> None:
    agent.stats = make_stats(tokens_confirmed=0, confirmed_as_of_utc="")
    agent.status = make_status(tokens_confirmed=0, held_out_loss=None)
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#totals", f"Confirmed      {NOT_YET}")
        assert f"Held-out loss  {NOT_YET}" in text_of(app, "#speed")
