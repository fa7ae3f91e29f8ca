"""The terminal: can the dashboard be drawn here, and will it be legible.

Runs in: the command line. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from volunteer.doctor.check import Check, Level

MIN_COLUMNS, MIN_ROWS = 40, 8
"""As the dashboard's (`tui.screens.main`); checked by a test."""
COMFORTABLE_COLUMNS, COMFORTABLE_ROWS = 80, 24


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminalFacts:
    """What this process is connected with."""

    closed: tuple[str, ...]
    """Which of stdin, stdout and stderr are no terminal; the dashboard draws on stderr."""
    columns: int
    rows: int
    encoding: str
    """Of what is printed."""
    environ: Mapping[str, str]


def terminal_checks(facts: TerminalFacts) -> list[Check]:
    """Return every check of the terminal."""
    return [_streams(facts), _kind(facts), _size(facts), _letters(facts), _colours(facts)]


def _check(level: Level, name: str, value: str, meaning: str, fix: str = "") -> Check:
    return Check(area="terminal", name=name, level=level, value=value, meaning=meaning, fix=fix)


def _streams(facts: TerminalFacts) -> Check:
    if not facts.closed:
        return _check("well", "streams", "a terminal", "the dashboard can be drawn")
    text = f"{', '.join(facts.closed)} no terminal: here `allmende` prints the status instead"
    return _check("note", "streams", "redirected", text)


def _kind(facts: TerminalFacts) -> Check:
    term = facts.environ.get("TERM", "")
    around = [
        name
        for name, variable in (("tmux", "TMUX"), ("screen", "STY"), ("SSH", "SSH_CONNECTION"))
        if facts.environ.get(variable)
    ]
    where = f", in {' and '.join(around)}" if around else ""
    if term in ("", "dumb"):
        text = f"TERM says that nothing can be drawn{where}: `allmende` prints the status instead"
        level: Level = "note" if facts.closed else "wrong"
        return _check(level, "TERM", term or "not set", text, "export TERM=xterm-256color")
    return _check("well", "TERM", term, f"the terminal can be drawn on{where}")


def _size(facts: TerminalFacts) -> Check:
    value = f"{facts.columns} x {facts.rows}"
    if facts.columns < MIN_COLUMNS or facts.rows < MIN_ROWS:
        text = f"the dashboard needs {MIN_COLUMNS} x {MIN_ROWS}"
        level: Level = "note" if facts.closed else "wrong"
        return _check(level, "size", value, text, "make the window larger")
    if facts.columns < COMFORTABLE_COLUMNS or facts.rows < COMFORTABLE_ROWS:
        text = f"some is left out below {COMFORTABLE_COLUMNS} x {COMFORTABLE_ROWS}"
        return _check("note", "size", value, text)
    return _check("well", "size", value, "all is shown")


def _letters(facts: TerminalFacts) -> Check:
    name = facts.encoding.lower().replace("-", "")
    if name == "utf8":
        return _check("well", "letters", facts.encoding, "lines and curves can be drawn")
    text = "lines and curves come out as question marks"
    level: Level = "note" if facts.closed else "wrong"
    return _check(level, "letters", facts.encoding, text, "export LC_ALL=C.UTF-8")


def _colours(facts: TerminalFacts) -> Check:
    environ = facts.environ
    if environ.get("NO_COLOR"):
        return _check("well", "colours", "none", "NO_COLOR is set; nothing is told by colour alone")
    if environ.get("COLORTERM") in ("truecolor", "24bit"):
        return _check("well", "colours", "16 million", "COLORTERM says so")
    value = "256" if "256" in environ.get("TERM", "") else "16"
    text = "if they are hard to read, TEXTUAL_THEME=ansi-dark takes the terminal's own"
    return _check("well", "colours", value, text)
