"""What the view looks like. After a wanted change: pytest tests/tui --snapshot-update, and look."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.color import Color
from textual.pilot import Pilot

from tests.fakes.fake_agent import (
    FakeAgent,
    make_history,
    make_peers,
    make_status,
    run_in_thread,
)
from tests.tui.conftest import main_screen, make_app, wait_text, wait_until
from tui.app import AllmendeApp
from tui.widgets.loss_chart import LossChart
from volunteer.answers import Status
from volunteer.locations import Locations

pytestmark = pytest.mark.slow

SCREENSHOT = Path(__file__).parents[2] / "docs" / "screenshot.svg"
SIZES = [(40, 10), (80, 24), (120, 40)]
THEMES = ["textual-dark", "textual-light"]

SnapCompare = Callable[..., bool]
Script = Callable[[FakeAgent], None]


def healthy(agent: FakeAgent) -> None:
    agent.history = make_history(40)


def crowded(agent: FakeAgent) -> None:
    healthy(agent)
    agent.peers = make_peers(30)


def paused(agent: FakeAgent) -> None:
    healthy(agent)
    agent.status = make_status(
        state="paused",
        reason="You paused it.",
        resumes_when="the pause ends, or you say `allmende resume` (1 h 58 min left)",
        trainer_pid=None,
        tokens_per_s=0.0,
    )


def fresh(agent: FakeAgent) -> None:
    """The first minute after an installation."""
    agent.status = Status(
        state="starting",
        reason="Building the weights of round 0.",
        resumes_when="they are built, in about a minute",
        run_name="commons",
    )
    agent.peers, agent.history = [], []


def alarmed(agent: FakeAgent) -> None:
    healthy(agent)
    agent.status = make_status(
        state="waiting",
        alarm="Two final commits of round 11 contradict each other: nothing is applied any more.",
        resumes_when="you have read `agent.log` and reported it",
    )


class Photographer:
    """Runs the view against a scripted agent until all is shown, and compares."""

    def __init__(self, locations: Locations, snap_compare: SnapCompare) -> None:
        self._locations = locations
        self._snap_compare = snap_compare

    def compare(
        self,
        script: Script,
        *,
        size: tuple[int, int] = (80, 24),
        theme: str = "textual-dark",
        press: tuple[str, ...] = (),
    ) -> bool:
        app = make_app(self._locations)
        with run_in_thread(self._locations.control_socket, script) as agent:

            async def settle(pilot: Pilot[None]) -> None:
                app.theme = theme
                await wait_shown(pilot, app, agent)
                await pilot.press(*press)
                await pilot.pause()

            return self._snap_compare(app, terminal_size=size, run_before=settle)


async def wait_shown(pilot: Pilot[None], app: AllmendeApp, agent: FakeAgent) -> None:
    """Wait until everything that the agent has to say is on the screen."""
    await wait_text(pilot, app, "#headline", agent.status.reason[:20])
    await wait_until(pilot, lambda: app._feed.snapshot.stats is not None)
    main_screen(app).show(app._feed.snapshot)
    await pilot.pause()
    if agent.history:
        assert main_screen(app).query_one(LossChart)._points


@pytest.fixture
def photographer(locations: Locations, snap_compare: SnapCompare) -> Photographer:
    return Photographer(locations, snap_compare)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_dashboard(photographer: Photographer, size: tuple[int, int], theme: str) -> None:
    assert photographer.compare(healthy, size=size, theme=theme)


@pytest.mark.parametrize("theme", THEMES)
def test_paused(photographer: Photographer, theme: str) -> None:
    assert photographer.compare(paused, theme=theme)


def test_first_minute(photographer: Photographer) -> None:
    assert photographer.compare(fresh)


def test_alarm(photographer: Photographer) -> None:
    assert photographer.compare(alarmed)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_peers(photographer: Photographer, size: tuple[int, int]) -> None:
    assert photographer.compare(crowded, size=size, press=("2",))


@pytest.mark.parametrize("theme", THEMES)
def test_stats(photographer: Photographer, theme: str) -> None:
    assert photographer.compare(healthy, press=("3",), theme=theme)


@pytest.mark.parametrize(
    ("key", "size"),
    [("p", (80, 24)), ("p", (40, 10)), ("Q", (80, 24)), ("question_mark", (80, 24))],
)
def test_dialogs(photographer: Photographer, key: str, size: tuple[int, int]) -> None:
    assert photographer.compare(healthy, press=(key,), size=size)


@pytest.mark.parametrize("theme", THEMES)
def test_agent_gone(locations: Locations, snap_compare: SnapCompare, theme: str) -> None:
    app = make_app(locations)

    async def settle(pilot: Pilot[None]) -> None:
        app.theme = theme
        async with FakeAgent(locations.control_socket) as agent:
            healthy(agent)
            await wait_shown(pilot, app, agent)
        await wait_text(pilot, app, "#headline", "The agent has gone")

    assert snap_compare(app, terminal_size=(80, 24), run_before=settle)


def test_too_small(photographer: Photographer) -> None:
    assert photographer.compare(healthy, size=(38, 7))


def test_no_color(photographer: Photographer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert photographer.compare(healthy)


async def test_the_readme_screenshot_is_what_the_view_shows(
    locations: Locations, pytestconfig: pytest.Config
) -> None:
    app = make_app(locations)
    async with FakeAgent(locations.control_socket) as agent:
        crowded(agent)
        async with app.run_test(size=(100, 30)) as pilot:
            await wait_shown(pilot, app, agent)
            drawn = _without_ids(app.export_screenshot(title="Allmende"))
    if pytestconfig.option.update_snapshots:
        SCREENSHOT.parent.mkdir(exist_ok=True)
        SCREENSHOT.write_text(drawn, encoding="utf-8")
    assert SCREENSHOT.read_text(encoding="utf-8") == drawn


def _without_ids(svg: str) -> str:
    """Take out the number that textual draws for each picture."""
    return re.sub(r"\bterminal-\d+-", "terminal-", svg)


async def test_every_theme_is_legible(locations: Locations) -> None:
    """Every word on the dashboard stands out from its background (WCAG: 3:1 is large text's)."""
    app = make_app(locations)
    async with FakeAgent(locations.control_socket) as agent:
        healthy(agent)
        async with app.run_test(size=(80, 24)) as pilot:
            await wait_shown(pilot, app, agent)
            for theme in THEMES:
                app.theme = theme
                await pilot.pause()
                faint = [(theme, text, ratio) for text, ratio in _contrasts(app) if ratio < 3.0]
                assert not faint


def _contrasts(app: AllmendeApp) -> list[tuple[str, float]]:
    """The words of the screen and how their colour contrasts with the background."""
    segments = [
        segment
        for strip in app.screen._compositor.render_strips()
        for segment in strip
        if re.search(r"\w", segment.text)
    ]
    assert len(segments) > 15
    contrasts = []
    for text, style, _ in segments:
        assert style is not None
        assert style.color is not None
        assert style.bgcolor is not None
        ink, paper = (_luminance(Color.from_rich_color(c)) for c in (style.color, style.bgcolor))
        contrasts.append((text, (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)))
    return contrasts


def _luminance(color: Color) -> float:
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
        for part in color.normalized
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
