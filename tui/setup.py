"""`allmende setup`: the first run's question, without the dashboard.

Runs in: the command line. It starts nothing. Run again, it keeps what was set by hand, but for what
is answered now.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from volunteer.errors import VolunteerError
from volunteer.locations import Locations

if TYPE_CHECKING:
    from volunteer.first_run import Plan, When

MAX_WIDTH = 100
_ANSWERS: dict[str, When] = {"1": "idle", "2": "always"}


class SetupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`allmende setup --json`: fields may be added, never renamed."""

    when: str
    """idle, or always."""
    config_file: str
    data_dir: str


class NotAskedError(VolunteerError):
    """There is no terminal to ask in, and `--yes` was not given."""

    hint = (
        "`allmende setup --yes` agrees to what `allmende setup --help` and the README say;"
        " `--when idle` or `--when always` says when it runs"
    )
    exit_code = 2


def setup(
    when: Annotated[
        Literal["idle", "always"] | None,
        typer.Option(
            help="idle: only while nobody uses this machine; always: nobody sits at it (a server)."
            " Default: as the settings have it, at first idle."
        ),
    ] = None,
    is_agreed: Annotated[
        bool, typer.Option("--yes", "-y", help="Agree, and ask nothing; needs no terminal.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for scripts; with --yes.")
    ] = False,
) -> None:
    """Say what is used, sent and stored, and ask when it runs. Starts nothing.

    It trains on the first GPU found, else on all CPU threads but one, at the lowest priority. It
    sends weight differences and small signed records to the run's peers, who see your IP address;
    no file, no text, no name. It stores a key, statistics, checkpoints and logs in your home.
    """
    from volunteer.first_run import keep_answers, make_plan, when_of

    locations = Locations.from_environment(os.environ)
    plan = make_plan(locations)
    if not is_agreed:
        if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise NotAskedError
        when = _ask(plan, when or when_of(plan.config))
    config = keep_answers(locations, when)
    answer = SetupAnswer(
        when=when_of(config),
        config_file=str(locations.config_file),
        data_dir=str(locations.data_dir),
    )
    if as_json:
        _write(msgspec.json.encode(answer).decode())
        return
    _write(*_result(answer, locations))


def _result(answer: SetupAnswer, locations: Locations) -> tuple[str, ...]:
    from tui.launch import is_agent_there

    how = "only while nobody uses this machine" if answer.when == "idle" else "always"
    what = (
        "The agent that runs obeys from now on."
        if is_agent_there(locations)
        else "Nothing runs yet: `allmende` starts it with the dashboard, `allmende start` without."
    )
    return (f"Kept: it runs {how}.", what)


def _ask(plan: Plan, when: When) -> When:
    """Return the answer of the one at the terminal.

    Raises:
        VolunteerError: it was no.
    """
    from tui import first_run_text

    width = min(shutil.get_terminal_size().columns, MAX_WIDTH) - 1
    _write(*first_run_text.told(plan, width), "", *first_run_text.choices(when, width), "")
    _write(*first_run_text.later(width), "")
    while True:
        try:
            sys.stdout.write("1 or 2, Enter for the marked one, n to leave: ")
            sys.stdout.flush()
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            line = ""
        if not line or line.strip().lower() in ("n", "no", "q"):
            raise VolunteerError("nothing was kept, and nothing was started")
        if not line.strip() or line.strip().lower() in ("y", "yes"):
            return when
        if line.strip() in _ANSWERS:
            return _ANSWERS[line.strip()]


def _write(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
