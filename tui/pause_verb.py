"""`allmende pause`, `resume` and `stop`: what it costs is said before, what came of it after.

Runs in: the command line.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import msgspec
import typer

from tui.client import CHANGE_DEADLINE_S, ControlClient
from tui.pause_words import cost_sentence, finish_sentence, is_training, released, round_left
from tui.view_state import state_sentence
from tui.wording import format_duration
from volunteer.answers import Status
from volunteer.errors import ControlError, NoAgentError
from volunteer.locations import Locations

STOP_DEADLINE_S = 60.0
"""The agent stops the trainer, which saves its work first; slow disks take their time."""
COST_DEADLINE_S = 1.0
"""The owner's word does not wait long for what it costs."""


def pause(locations: Locations, for_s: float | None, *, is_finish: bool, as_json: bool) -> None:
    """Pause now, for a while, or once the round has closed.

    Raises:
        BadParameter: both `--for` and `--finish`.
        ControlError: refused, or paused and not all is free; the message says who holds it.
    """
    if is_finish and for_s is not None:
        raise typer.BadParameter("--for and --finish exclude each other")
    before = None if as_json else _status_if_quick(locations)
    if before is not None:
        is_awaited = is_finish and is_training(before)
        _write(f"{round_left(before)}." if is_awaited else cost_sentence(before))
    args: dict[str, float] = {"finish": True} if is_finish else {}
    with _client(locations) as client, _nothing_to("pause"):
        client.request("pause", object, args if for_s is None else {"for_s": for_s})
        current = client.request("status", Status)
    if as_json:
        _write_json(current)
        return
    _write(*_paused(current, for_s), f"  {state_sentence(current)}")


def _paused(current: Status, for_s: float | None) -> list[str]:
    if waits_for := finish_sentence(current):
        return [f"{waits_for} `allmende resume` takes that back."]
    how_long = f" for {format_duration(for_s)}" if for_s is not None else ""
    gave_back = released(current)
    said = f"Paused{how_long}. `allmende resume` ends the pause."
    return [said, *([f"  {gave_back}"] if gave_back else [])]


def resume(locations: Locations, *, as_json: bool) -> None:
    """End the pause, or take a finish back.

    Raises:
        ControlError: no agent runs, or it refuses.
    """
    with _client(locations) as client:
        client.request("resume", object)
        current = client.request("status", Status)
    if as_json:
        _write_json(current)
        return
    _write(state_sentence(current))


def stop(locations: Locations, *, is_finish: bool, as_json: bool) -> None:
    """Stop the agent now, or once the round has closed.

    Raises:
        ControlError: no agent runs, it refuses, or it has not ended within `STOP_DEADLINE_S`.
    """
    before = _status_if_quick(locations)
    if not as_json and before is not None and is_training(before):
        _write(f"{round_left(before)}.")
    with _client(locations) as client, _nothing_to("stop"):
        # An agent of another version must be stoppable, or it could never be replaced.
        args: dict[str, float] = {"finish": True} if is_finish else {}
        last = client.request("status", Status) if as_json else None
        reply = client.request("stop", object, args, any_version=True)
        goes_on = reply == {"stopping": False}
        current = client.request("status", Status) if goes_on else None
        if current is None:
            client.wait_closed(STOP_DEADLINE_S)
    if current is not None:
        if as_json:
            _write_json(current)
        else:
            _write(f"{finish_sentence(current)} `allmende resume` takes that back.")
    elif last is not None:
        _write_json(msgspec.structs.replace(last, state="stopped", trainer_pid=None))
    else:
        _write("The agent has stopped; its work is saved. `allmende start` starts it again.")


@contextlib.contextmanager
def _nothing_to(verb: str) -> Iterator[None]:
    """Say so where no agent runs: to start one is not what the owner has in mind just now."""
    try:
        yield
    except NoAgentError as error:
        if error.hint != NoAgentError.hint or str(error) != str(NoAgentError()):
            raise  # it runs, or has just gone
        raise NoAgentError(f"No agent is running: there is nothing to {verb}.", hint="") from error


def _status_if_quick(locations: Locations) -> Status | None:
    try:
        with _client(locations, COST_DEADLINE_S) as client:
            return client.request("status", Status)
    except ControlError:
        return None


def _client(locations: Locations, deadline_s: float = CHANGE_DEADLINE_S) -> ControlClient:
    return ControlClient(locations.control_socket, deadline_s=deadline_s)


def _write(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()  # what it costs is read before it is done


def _write_json(value: object) -> None:
    _write(msgspec.json.encode(value).decode())
