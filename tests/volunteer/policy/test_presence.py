"""What every source says, put together: the least idle time counts, and nothing is guessed."""

from __future__ import annotations

import dataclasses
import math

import pytest

from volunteer.policy.sensors.display import DisplayReading
from volunteer.policy.sensors.presence import HIDDEN, Sources, combine
from volunteer.policy.sensors.session_bus import DesktopReading
from volunteer.policy.sensors.system_bus import Session, SystemReading
from volunteer.policy.sensors.terminals import TerminalReading
from volunteer.policy.sensors.watcher import Reading
from volunteer.policy.signals import InputReading, SourceFailure

NOW_S = 10_000.0
BARE = Sources(
    displays={},
    shared=Reading(None),
    desktop=Reading(None),
    system=Reading(None),
    terminals=Reading(TerminalReading(-math.inf)),
    is_hidden=False,
    started_at_s=9000.0,
)
"""A server without anything."""


def read(**changes: object) -> InputReading:
    return combine(dataclasses.replace(BARE, **changes), NOW_S)  # type: ignore[arg-type]


def display(idle_s: float, **more: bool) -> Reading[DisplayReading | None]:
    return Reading(DisplayReading(NOW_S - idle_s, **more))


def session(user: str = "me", **changes: object) -> Session:
    base = Session(
        user=user, is_own=user == "me", is_active=True, is_locked=False, idle_since_s=None
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def system(*sessions: Session, **more: object) -> Reading[SystemReading | None]:
    return Reading(SystemReading(sessions=sessions, **more))  # type: ignore[arg-type]


def test_a_bare_server_has_no_desktop_and_nobody_at_a_terminal() -> None:
    assert read() == InputReading(has_desktop=False, terminal_idle_s=math.inf)


def test_typing_on_a_server_counts_from_its_start_on() -> None:
    """Whoever typed `allmende` there has said go."""
    before = read(terminals=Reading(TerminalReading(8999.0, "pts/0")))
    assert before.terminal_idle_s == math.inf
    after = read(terminals=Reading(TerminalReading(9990.0, "pts/0")))
    assert (after.terminal_idle_s, after.terminal) == (10.0, "pts/0")


def test_on_a_desktop_typing_before_the_start_counts() -> None:
    reading = read(
        displays={"X11 :0": display(700.0)}, terminals=Reading(TerminalReading(8000.0, "pts/0"))
    )
    assert reading.terminal_idle_s == 2000.0


def test_terminals_that_cannot_be_read_are_unknown() -> None:
    reading = read(terminals=Reading(None, "Permission denied"))
    assert reading.terminal_idle_s is None
    assert reading.failures == (SourceFailure(name="terminals", problem="Permission denied"),)


def test_the_least_of_all_desktop_sources_counts() -> None:
    reading = read(
        displays={"X11 :0": display(700.0), "Wayland wayland-0": display(30.0)},
        shared=display(50.0),
        desktop=Reading(DesktopReading(touched_at_s=NOW_S - 40.0)),
    )
    assert (reading.has_desktop, reading.idle_s) == (True, 30.0)
    assert reading.desktop_source == "Wayland wayland-0"
    assert read(shared=display(50.0)).desktop_source == "idle_detect"
    gnome = read(desktop=Reading(DesktopReading(touched_at_s=NOW_S + 1.0)))
    assert (gnome.desktop_source, gnome.idle_s) == ("GNOME", 0.0)


def test_a_display_that_does_not_tell_is_a_desktop_of_unknown_idleness() -> None:
    reading = read(displays={"X11 :0": Reading(None, "it does not let us in")})
    assert (reading.has_desktop, reading.idle_s) == (True, None)
    assert reading.failures == (SourceFailure(name="X11 :0", problem="it does not let us in"),)


def test_a_display_that_is_gone_is_no_desktop() -> None:
    assert read(displays={"Wayland wayland-0": Reading(None)}).has_desktop is False
    assert read(displays={"X11 :0": Reading(None, is_first=True)}).has_desktop is False


def test_services_that_hang_are_named_although_the_bus_answers() -> None:
    reading = read(
        displays={"X11 :0": display(5.0)}, desktop=Reading(DesktopReading(problem="no answer"))
    )
    assert reading.idle_s == 5.0
    assert reading.failures == (SourceFailure(name="session bus", problem="no answer"),)


@pytest.mark.parametrize("problem", ["shared", "desktop", "system"])
def test_each_failing_source_is_named(problem: str) -> None:
    reading = read(**{problem: Reading(None, "silent")})
    assert [failure.problem for failure in reading.failures] == ["silent"]


def test_a_session_is_a_desktop_even_if_nothing_else_tells() -> None:
    reading = read(system=system(session()))
    assert (reading.has_desktop, reading.idle_s, reading.is_locked) == (True, None, False)


def test_logind_alone_is_believed_when_it_says_idle_and_never_when_it_says_busy() -> None:
    idle = read(system=system(session(idle_since_s=9000.0)))
    assert (idle.idle_s, idle.desktop_source) == (1000.0, "logind")
    two = read(system=system(session(idle_since_s=9000.0), session(idle_since_s=None)))
    assert two.idle_s is None, "one of them does not say so"
    with_input = read(
        system=system(session(idle_since_s=9000.0)), displays={"X11 :0": display(3.0)}
    )
    assert with_input.idle_s == 3.0, "input is the better source"


def test_another_users_session_is_only_known_by_logind() -> None:
    there = read(system=system(session("anna")), displays={"X11 :1": display(500.0)})
    assert there.failures == (
        SourceFailure(name="logind", problem="does not say whether anna is away"),
    )
    away = read(
        system=system(session("anna", idle_since_s=NOW_S - 90.0)),
        displays={"X11 :1": display(500.0)},
    )
    assert (away.idle_s, away.desktop_source) == (90.0, "anna's session")
    asleep = read(system=system(session("anna", is_active=False)))
    assert asleep.failures == ()


@pytest.mark.parametrize(
    ("sessions", "is_saver_on", "expected"),
    [
        ((), None, None),
        ((), True, True),
        ((), False, None),
        ((session(is_locked=True),), None, True),
        ((session(),), False, False),
        ((session(), session("anna", is_locked=True)), None, False),
        ((session(is_active=False), session("anna", is_locked=True)), None, True),
        ((session(),), True, True),
    ],
)
def test_locked_is_when_every_desktop_is(
    sessions: tuple[Session, ...], is_saver_on: bool | None, expected: bool | None
) -> None:
    reading = read(
        system=system(*sessions), desktop=Reading(DesktopReading(is_saver_on=is_saver_on))
    )
    assert reading.is_locked is expected


def test_inhibitors_are_named_once() -> None:
    reading = read(
        desktop=Reading(DesktopReading(inhibitors=("mpv", "vlc"))),
        system=system(inhibitors=("mpv",)),
        displays={"Wayland wayland-0": display(90.0, is_inhibited=True)},
    )
    assert reading.inhibitors == ("mpv", "vlc")
    nameless = read(displays={"Wayland wayland-0": display(90.0, is_inhibited=True)})
    assert nameless.inhibitors == ("a program",)


def test_what_may_be_hidden_is_unknown_until_something_tells() -> None:
    reading = read(is_hidden=True)
    assert reading.has_desktop is None
    assert reading.failures == (SourceFailure(name="desktop", problem=HIDDEN),)
    seen = read(is_hidden=True, displays={"X11 :0": display(5.0)})
    assert (seen.has_desktop, seen.failures) == (True, ())
