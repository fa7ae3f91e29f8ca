"""The first run: nothing is started before the owner has been told and has agreed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from tests.fakes.fake_agent import FakeAgent, run_in_thread
from tests.fakes.first_run import make_plan
from tests.tui.command_line import FAKE_START, run
from tests.tui.conftest import frozen_clock, wait_text, wait_until
from tests.tui.test_terminal import exit_status, open_view, read_until
from tui import launch
from tui.app import AllmendeApp
from tui.feed import AgentFeed
from tui.screens.first_run import FirstRunScreen
from volunteer.config import load_config
from volunteer.first_run import has_answered
from volunteer.locations import Locations
from volunteer.messages import ControlFault

pytestmark = pytest.mark.slow

SIZES = [(40, 10), (80, 24), (120, 40)]
SnapCompare = Callable[..., bool]


def asking_app(locations: Locations) -> AllmendeApp:
    feed = functools.partial(AgentFeed, silent_after_s=10.0, retry_every_s=0.02)
    plan = make_plan()
    return AllmendeApp(locations, plan=plan, clock=frozen_clock, make_feed=feed)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[Locations]:
    """Every start of an agent that was tried; none comes up."""
    tried: list[Locations] = []

    def start(locations: Locations, *_: object, **__: object) -> None:
        tried.append(locations)

    monkeypatch.setattr(launch, "start_agent", start)
    return tried


async def asked(pilot: Pilot[None], app: AllmendeApp) -> None:
    await wait_until(pilot, lambda: isinstance(app.screen, FirstRunScreen))


def shown(app: AllmendeApp) -> str:
    return "\n".join(str(static.content) for static in app.screen.query(Static))


async def test_enter_keeps_the_answer_and_starts(
    locations: Locations, starts: list[Locations]
) -> None:
    app = asking_app(locations)
    async with app.run_test(size=(80, 24)) as pilot:
        await asked(pilot, app)
        assert "Nothing runs yet" in shown(app)
        assert "who see your IP address" in shown(app).replace("\n          ", " ")
        assert not starts
        await pilot.press("enter")
        await wait_until(pilot, lambda: bool(starts))
        async with FakeAgent(locations.control_socket):
            await wait_text(pilot, app, "#headline", "● Contributing")
    assert has_answered(locations)
    assert not load_config(locations.config_file, {}).headless
    assert len(starts) == 1


async def test_an_answer_may_be_that_nobody_sits_there(
    locations: Locations, starts: list[Locations]
) -> None:
    app = asking_app(locations)
    async with app.run_test(size=(40, 10)) as pilot:
        await asked(pilot, app)
        await pilot.press("2", "1", "2")
        assert "(x) 2" in shown(app)
        await pilot.press("enter")
        await wait_until(pilot, lambda: bool(starts))
    assert load_config(locations.config_file, {}).headless


@pytest.mark.parametrize("key", ["escape", "q", "n", "ctrl+q", "ctrl+c"])
async def test_whoever_leaves_has_started_nothing(
    locations: Locations, starts: list[Locations], key: str
) -> None:
    app = asking_app(locations)
    async with app.run_test() as pilot:
        await asked(pilot, app)
        await pilot.press("s", "p", "Q", "tab", "question_mark")
        await pilot.pause()
        await pilot.press(key)
        await wait_until(pilot, lambda: not app.is_running)
    assert app.return_code == 0
    assert not starts
    assert not has_answered(locations)


async def test_the_palette_starts_nothing_either(locations: Locations) -> None:
    app = asking_app(locations)
    async with app.run_test() as pilot:
        await asked(pilot, app)
        titles = [command.title for command in app.get_system_commands(app.screen)]
        assert titles == ["Close the view", "Help", "Theme"]


async def test_an_answer_that_cannot_be_kept_starts_nothing(
    locations: Locations, starts: list[Locations]
) -> None:
    app = asking_app(locations)
    locations.prepare()
    locations.config_file.write_text("threads = -1\n")
    async with app.run_test() as pilot:
        await asked(pilot, app)
        await pilot.press("enter")
        await wait_until(pilot, lambda: not app.is_running)
    assert app.return_code == 2
    assert not starts


@pytest.mark.parametrize("theme", ["textual-dark", "textual-light"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_question_looks_so(
    locations: Locations, snap_compare: SnapCompare, size: tuple[int, int], theme: str
) -> None:
    app = asking_app(locations)

    async def settle(pilot: Pilot[None]) -> None:
        app.theme = theme
        await asked(pilot, app)
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=settle)


async def test_all_of_it_is_seen_at_once_at_80_x_24(locations: Locations) -> None:
    app = asking_app(locations)
    async with app.run_test(size=(80, 24)) as pilot:
        await asked(pilot, app)
        assert app.screen.query_one("#first-run").max_scroll_y == 0


# ------------------------------------------------------------------------------ the real command


@pytest.mark.system
def test_the_bare_command_asks_once_and_then_never_again(home: Path, locations: Locations) -> None:
    pid, terminal = open_view(home)
    try:
        read_until(terminal, b"Esc: leave")
        os.write(terminal, b"\x1b")
        read_until(terminal, b"Nothing was started")
        assert exit_status(pid) == 0
    finally:
        os.close(terminal)
    assert not has_answered(locations)
    assert run(home, "status").returncode == 3
    assert run(home, "setup", "--yes").returncode == 0
    locations.config_file.write_text("threads = -1\n")  # so that no agent comes up
    pid, terminal = open_view(home)
    try:
        read_until(terminal, b"Not running")
        os.write(terminal, b"q")
        assert exit_status(pid) == 0
    finally:
        os.close(terminal)


@pytest.mark.system
def test_settings_that_are_not_valid_are_told_instead_of_the_question(home: Path) -> None:
    (home / "config.toml").write_text("threads = -1\n")
    pid, terminal = open_view(home)
    try:
        shown_text = read_until(terminal, b"hint: ")
        assert b"line 1" in shown_text
        assert b"\x1b" not in shown_text
        assert exit_status(pid) == 2
    finally:
        os.close(terminal)


@pytest.mark.system
def test_beside_an_agent_that_runs_nothing_is_asked(home: Path, locations: Locations) -> None:
    refusal = ControlFault(message="not now", hint="", exit_code=1)

    def script(agent: FakeAgent) -> None:
        agent.faults["status"] = refusal

    with run_in_thread(locations.control_socket, script):
        assert launch.is_agent_there(locations)
    assert not launch.is_agent_there(locations)


# ----------------------------------------------------------------------------------------- setup


def test_setup_without_a_terminal_says_which_flags_it_needs(home: Path) -> None:
    for flags in ((), ("--json",), ("--when", "idle")):
        result = run(home, "setup", *flags)
        assert (result.returncode, result.stdout) == (2, "")
        assert "There is no terminal" in result.stderr
        assert "`--when idle` or `--when always`" in result.stderr
    assert run(home, "setup", "--when", "never", "--yes").returncode == 2
    assert not list(home.iterdir())


def test_setup_keeps_the_answer_and_starts_nothing(home: Path, locations: Locations) -> None:
    result = run(home, "setup", "--yes")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Kept: it runs only while nobody uses this machine.")
    assert "Nothing runs yet" in result.stdout
    assert has_answered(locations)
    assert run(home, "status").returncode == 3
    (home / "config.toml").write_text("threads = 3\n")
    told = msgspec.json.decode(run(home, "setup", "--yes", "--when", "always", "--json").stdout)
    assert told == {
        "when": "always", "config_file": str(home / "config.toml"), "data_dir": str(home),
    }  # fmt: skip
    assert "always" in run(home, "setup", "--yes").stdout, "it stays as it was answered"
    config = load_config(locations.config_file, {})
    assert (config.threads, config.headless) == (3, True)


def test_setup_tells_that_an_agent_runs(home: Path, fake: FakeAgent) -> None:
    del fake
    assert "The agent that runs obeys" in run(home, "setup", "--yes").stdout


@pytest.mark.system
@pytest.mark.parametrize(
    ("typed", "status", "words", "is_headless"),
    [
        (b"\n", 0, b"Kept: it runs only while", False),
        (b"maybe\n2\n", 0, b"Kept: it runs always", True),
        (b"n\n", 1, b"nothing was kept", None),
        (b"\x04", 1, b"nothing was kept", None),
        (b"\x03", 1, b"nothing was kept", None),
    ],
)
def test_setup_at_a_terminal_tells_and_asks(
    home: Path,
    locations: Locations,
    typed: bytes,
    status: int,
    words: bytes,
    is_headless: bool | None,
) -> None:
    pid, terminal = open_view(home, "setup")
    try:
        told = read_until(terminal, b"n to leave: ")
        assert b"who see your IP address" in told.replace(b"\r\n          ", b" ")
        os.write(terminal, typed)
        read_until(terminal, words)
        assert exit_status(pid) == status
    finally:
        os.close(terminal)
    assert has_answered(locations) == (is_headless is not None)
    if is_headless is not None:
        assert load_config(locations.config_file, {}).headless == is_headless


def test_an_explicit_start_asks_nothing(started_home: Path, locations: Locations) -> None:
    result = run(started_home, "start", code=FAKE_START)
    assert result.returncode == 0, result.stderr
    assert not has_answered(locations)
