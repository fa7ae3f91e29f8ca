"""The owner's commands in the view: pausing, stopping, starting; what each says, and asks first."""

from __future__ import annotations

import sys

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot

from tests.fakes.fake_agent import FakeAgent, make_status
from tests.tui.conftest import make_app, shows, text_of, verbs, wait_text, wait_until
from tui import launch
from tui.app import AllmendeApp
from tui.screens.dialogs import PauseDialog, StopDialog
from tui.view_state import Link
from volunteer.answers import Status
from volunteer.errors import ControlError
from volunteer.locations import Locations
from volunteer.messages import CONTROL_VERSION, ControlFault

pytestmark = pytest.mark.slow


async def test_a_pause_is_explained_before_it_is_made(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await pilot.press("p")
        await wait_until(pilot, shows(app, PauseDialog))
        assert "pause" not in verbs(agent)
        await pilot.press("escape")
        await pilot.press("p")
        await wait_until(pilot, shows(app, PauseDialog))
        await pilot.press("2")
        await wait_text(pilot, app, "#headline", "‖ Paused")
        assert [r.args for r in agent.requests if r.verb == "pause"] == [{"for_s": 7200.0}]


async def test_p_twice_pauses_and_once_more_resumes(agent: FakeAgent, locations: Locations) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await pilot.press("p")
        await wait_until(pilot, shows(app, PauseDialog))
        await pilot.press("p")
        await wait_text(pilot, app, "#headline", "‖ Paused")
        assert [r.args for r in agent.requests if r.verb == "pause"] == [{}]
        await pilot.press("p")
        await wait_text(pilot, app, "#headline", "● Contributing")
        assert verbs(agent).count("resume") == 1


async def test_a_pause_waits_for_no_answer(agent: FakeAgent, locations: Locations) -> None:
    agent.silent_verbs |= {"watch", "history", "peers", "stats"}
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: "watch" in verbs(agent))
        await pilot.press("p")
        await wait_until(pilot, shows(app, PauseDialog))
        await pilot.press("escape")
        agent.silent_verbs.remove("watch")
        await agent.close()
        async with FakeAgent(locations.control_socket) as second:
            second.silent_verbs |= {"history", "peers", "stats"}
            await wait_text(pilot, app, "#headline", "Contributing")
            await wait_until(pilot, lambda: "history" in verbs(second))
            await pilot.press("p", "p")
            await wait_text(pilot, app, "#headline", "‖ Paused")
            assert verbs(second)[-2:] == ["pause", "status"]


async def test_how_long_a_pause_lasts_is_live(agent: FakeAgent, locations: Locations) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        app._draw_every_s = 0.0
        for left in ("58 min", "57 min", "12 s"):
            until = f"the pause ends, or you say `allmende resume` ({left} left)"
            await agent.push(state="paused", reason="paused by you", resumes_when=until)
            await wait_text(pilot, app, "#headline", f"It resumes when {until}.")


async def test_a_refused_pause_is_said(agent: FakeAgent, locations: Locations) -> None:
    agent.faults["pause"] = ControlFault(message="not in this state", hint="wait a moment")
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await pilot.press("p", "p")
        await wait_until(pilot, lambda: bool(app._notifications))
        assert [n.message for n in app._notifications] == ["not in this state. wait a moment"]
        assert text_of(app, "#headline").startswith("● Contributing")


async def test_stopping_asks_once_and_closes_the_view(
    agent: FakeAgent, locations: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await pilot.press("Q")
        await wait_until(pilot, shows(app, StopDialog))
        await pilot.press("escape")
        await wait_until(pilot, lambda: not shows(app, StopDialog)())
        assert "stop" not in verbs(agent)
        await pilot.press("Q")
        await wait_until(pilot, shows(app, StopDialog))
        await pilot.press("Q")
        await agent.stopped.wait()
        await wait_until(pilot, lambda: not app.is_running)
    app._print_error_renderables()
    assert "The agent has stopped" in capsys.readouterr().err
    assert verbs(agent)[-1] == "stop"


async def test_an_agent_of_another_version_can_be_stopped(
    agent: FakeAgent, locations: Locations
) -> None:
    agent.version = CONTROL_VERSION + 1
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "the agent speaks control version 2")
        await pilot.press("Q")
        await wait_until(pilot, shows(app, StopDialog))
        await pilot.press("y")
        await wait_until(pilot, lambda: not app.is_running)
    assert agent.stopped.is_set()


async def test_a_stop_that_is_refused_leaves_the_view_open(
    agent: FakeAgent, locations: Locations
) -> None:
    agent.faults["stop"] = ControlFault(message="not while publishing")
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await pilot.press("Q", "Q")
        await wait_until(pilot, lambda: "stop" in verbs(agent))
        await wait_until(pilot, lambda: len(app._notifications) == 2)
        assert [n.message for n in app._notifications][-1] == "not while publishing"
        assert app.is_running


async def test_it_starts_an_agent_where_none_runs(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> Status:
        return make_status()

    monkeypatch.setattr(launch, "start_agent", start)
    app = make_app(locations, start_if_none=True)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app._feed.snapshot.link is not Link.CONNECTING)
        async with FakeAgent(locations.control_socket):
            await wait_text(pilot, app, "#headline", "● Contributing")


async def test_it_is_started_again_as_it_ran(
    agent: FakeAgent, locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, ...]] = []

    def start(locations: Locations, argv: tuple[str, ...], **_: object) -> Status:
        started.append(argv)
        raise ControlError("it ended at once")

    flags = {4242: ("--ignore-idle", "--device", "cpu"), 4243: ()}
    monkeypatch.setattr(launch, "running_options", lambda pid: flags[pid])
    monkeypatch.setattr(launch, "start_agent", start)
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_until(pilot, lambda: app._feed.snapshot.flags == flags[4242])
        await agent.close()
        await wait_text(pilot, app, "#headline", "start it as it ran: --ignore-idle --device cpu")
        await pilot.press("s")
        await wait_text(pilot, app, "#headline", "it ended at once")
        async with FakeAgent(locations.control_socket) as second:
            second.status = make_status(agent_pid=4243)
            await wait_until(pilot, lambda: not app._feed.snapshot.flags)
        await wait_text(pilot, app, "#headline", "Press s to start it.")
        await pilot.press("s")
        await wait_until(pilot, lambda: len(started) == 2)
    assert started == [flags[4242], ()]


async def test_a_start_that_the_config_forbids_is_not_tried(locations: Locations) -> None:
    locations.prepare()
    locations.config_file.write_text("threads = -1\n")
    app = make_app(locations, start_if_none=True)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "line 1: `threads` must be 0 to 1_024, not -1")
    assert not list(locations.log_dir.iterdir())


async def test_a_failed_start_says_why_until_the_next_one(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = (sys.executable, "-c", "import sys; sys.exit('first\\nno such device')")
    monkeypatch.setattr(launch, "AGENT_COMMAND", failing)
    app = make_app(locations, start_if_none=True)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "no such device")
        assert "exit status 1" in text_of(app, "#headline")
        await _is_still_shown(pilot, app)
        log = locations.log_dir / "agent.log"
        size = log.stat().st_size
        await pilot.press("s")
        await wait_until(pilot, lambda: log.stat().st_size > size)
        await wait_text(pilot, app, "#headline", "no such device")


async def _is_still_shown(pilot: Pilot[None], app: AllmendeApp) -> None:
    for _ in range(5):
        await pilot.pause()
        assert "no such device" in text_of(app, "#headline")


async def test_an_agent_that_runs_is_not_started_again(
    agent: FakeAgent, locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "AGENT_COMMAND", ("/nonexistent",))
    app = make_app(locations, start_if_none=True)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "● Contributing")
        assert verbs(agent)[0] == "status"


async def test_the_palette_offers_what_can_be_done(agent: FakeAgent, locations: Locations) -> None:
    def titles() -> list[str]:
        return [command.title for command in app.get_system_commands(app.screen)]

    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        assert titles() == ["Pause", "Stop the agent", "Close the view", "Help", "Theme"]
        await agent.push(state="paused")
        await wait_until(pilot, lambda: "Resume" in titles())
        assert titles() == ["Resume", "Stop the agent", "Close the view", "Help", "Theme"]
        for command in app.get_system_commands(app.screen):
            if command.title == "Resume":
                command.callback()
        await wait_text(pilot, app, "#headline", "● Contributing")
        await agent.close()
        await wait_until(pilot, lambda: "Start the agent" in titles())
        assert titles() == ["Start the agent", "Close the view", "Help", "Theme"]
        await pilot.press("ctrl+p")
        await wait_until(pilot, shows(app, CommandPalette))


async def test_a_round_is_finished_with_f_twice_and_that_is_taken_back_with_r(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await pilot.press("f")
        await wait_until(pilot, shows(app, PauseDialog))
        await pilot.press("f")
        await wait_text(pilot, app, "#headline", "this machine pauses, as you said.")
        assert [r.args for r in agent.requests if r.verb == "pause"] == [{"finish": True}]
        await pilot.press("z")
        await wait_until(pilot, shows(app, PauseDialog))
        await pilot.press("r")
        await wait_until(pilot, lambda: verbs(agent).count("resume") == 1)


async def test_stopping_after_the_round_leaves_the_view_open(
    agent: FakeAgent, locations: Locations
) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await pilot.press("Q")
        await wait_until(pilot, shows(app, StopDialog))
        await pilot.press("f")
        await wait_text(pilot, app, "#headline", "the agent stops, as you said.")
        assert [r.args for r in agent.requests if r.verb == "stop"] == [{"finish": True}]
        assert app.is_running


async def test_where_nothing_is_trained_no_round_is_finished_before_the_stop(
    agent: FakeAgent, locations: Locations
) -> None:
    agent.status = make_status(state="paused")
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Paused")
        await pilot.press("Q")
        await wait_until(pilot, shows(app, StopDialog))
        await pilot.press("f")
        await wait_until(pilot, lambda: "stop" in verbs(agent))
        assert [r.args for r in agent.requests if r.verb == "stop"] == [{}]


async def test_a_snooze_of_half_an_hour(agent: FakeAgent, locations: Locations) -> None:
    app = make_app(locations)
    async with app.run_test() as pilot:
        await wait_text(pilot, app, "#headline", "Contributing")
        await pilot.press("z", "h")
        await wait_text(pilot, app, "#headline", "7.60 GB of GPU memory are free again.")
        assert [r.args for r in agent.requests if r.verb == "pause"] == [{"for_s": 1800.0}]
