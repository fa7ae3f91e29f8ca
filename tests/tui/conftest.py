"""What the tests of tui share: short socket paths, a frozen clock, a quick feed."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot

from tests.fakes.fake_agent import FakeAgent, run_in_thread
from tests.tui.command_line import run
from tui.app import AllmendeApp
from tui.feed import AgentFeed
from tui.screens.main import MainScreen
from tui.widgets.rows import Text
from volunteer.answers import Status
from volunteer.locations import Locations

NOW = datetime(2026, 11, 30, 14, 3, 22, tzinfo=UTC)


def frozen_clock() -> datetime:
    return NOW


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLORFGBG", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture
def home() -> Iterator[Path]:
    # tmp_path is longer than a unix socket's name may be.
    with tempfile.TemporaryDirectory(prefix="allm-") as folder:
        yield Path(folder)


@pytest.fixture
def locations(home: Path) -> Locations:
    return Locations.from_environment({"ALLMENDE_HOME": str(home)})


@pytest.fixture
async def agent(locations: Locations) -> AsyncIterator[FakeAgent]:
    async with FakeAgent(locations.control_socket) as agent:
        yield agent


def make_app(
    locations: Locations,
    *,
    start_if_none: bool = False,
    silent_after_s: float = 10.0,
    request_deadline_s: float = 10.0,
) -> AllmendeApp:
    feed = functools.partial(
        AgentFeed,
        silent_after_s=silent_after_s,
        retry_every_s=0.02,
        request_deadline_s=request_deadline_s,
    )
    return AllmendeApp(locations, start_if_none=start_if_none, clock=frozen_clock, make_feed=feed)


async def wait_until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Let the application run until `condition` holds; pytest's timeout bounds it."""
    while not condition():
        await pilot.pause()
    await pilot.pause()


def verbs(agent: FakeAgent) -> list[str]:
    return [request.verb for request in agent.requests]


def shows(app: AllmendeApp, dialog: type) -> Callable[[], bool]:
    return lambda: isinstance(app.screen, dialog)


def main_screen(app: AllmendeApp) -> MainScreen:
    return next(screen for screen in app.screen_stack if isinstance(screen, MainScreen))


def text_of(app: AllmendeApp, selector: str) -> str:
    """The text that a widget of the main screen shows."""
    return main_screen(app).query_one(selector, Text).text


async def wait_text(pilot: Pilot[None], app: AllmendeApp, selector: str, words: str) -> None:
    def is_shown() -> bool:
        screens = [screen for screen in app.screen_stack if isinstance(screen, MainScreen)]
        return bool(screens) and words in text_of(app, selector)

    await wait_until(pilot, is_shown)


@pytest.fixture
def fake(locations: Locations) -> Iterator[FakeAgent]:
    with run_in_thread(locations.control_socket, lambda agent: None) as agent:
        yield agent


@pytest.fixture
def started_home(home: Path) -> Iterator[Path]:
    """A folder whose agent is ended at the end, however the test ends."""
    yield home
    result = run(home, "status", "--json")
    if result.returncode == 0:
        os.kill(msgspec.json.decode(result.stdout, type=Status).agent_pid, signal.SIGKILL)
