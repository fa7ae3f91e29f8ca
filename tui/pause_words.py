"""What a pause costs, said before it is made, and what it gave back, said after.

Runs in: tui and command line. Pure.
"""

from __future__ import annotations

from datetime import datetime

from tui.wording import clean, format_bytes, format_duration, format_tokens, format_utc
from volunteer.answers import Status

_SAVED = (
    "Steps are saved first: a pause loses nothing, or, if the trainer has to be killed, at most"
    " those since its last checkpoint."
)


def round_left(status: Status) -> str:
    """Return `Round 412, step 310, closes in about 6 min 10 s`, as far as that is known."""
    where = f"Round {status.round_index}, step {status.inner_step},"
    left_s = status.round_s - status.round_elapsed_s
    if status.round_s <= 0.0:
        return f"{where} is open"
    if left_s <= 0.0:
        return f"{where} is closing now"
    return f"{where} closes in about {format_duration(left_s)}"


def is_training(status: Status) -> bool:
    """Tell whether a pause would interrupt anything."""
    return status.state in ("contributing", "starting", "catching_up")


def cost_sentence(status: Status) -> str:
    """Say in one sentence what a pause costs now."""
    if not is_training(status):
        return "Nothing is trained just now: a pause costs nothing."
    if status.state != "contributing" and not status.tokens_since_contribution:
        return "Nothing has been trained in this round yet: a pause loses nothing, but misses it."
    return f"{round_left(status)}; pausing now keeps your steps but misses this round."


def pause_cost(status: Status | None) -> tuple[str, ...]:
    """Say what a pause costs, before it is made; one sentence a line."""
    if status is None:
        return (_SAVED,)
    lines = [cost_sentence(status)]
    if is_training(status):
        lines.append(_SAVED)
    if status.tokens_since_contribution:
        kept = format_tokens(status.tokens_since_contribution)
        lines.append(f"{kept} not sent yet are kept, and sent after you resume.")
    return tuple(lines)


def finish_sentence(status: Status) -> str:
    """Say what the owner's `finish` is waiting for; empty where nothing is to be finished."""
    if status.finishes_round is None:
        return ""
    then = "the agent stops" if status.stops_then else "this machine pauses"
    left_s = status.round_s - status.round_elapsed_s
    is_open = status.round_index == status.finishes_round and left_s > 0.0
    when = f", in about {format_duration(left_s)}" if is_open else ""
    return f"When round {status.finishes_round} has closed{when}, {then}, as you said."


def released(status: Status) -> str:
    """Say what the last pause gave back, or what did not come back; empty while that is unknown."""
    release = status.release
    if release is None:
        return ""
    if release.problem:
        return f"Not all is free: {clean(release.problem)}."
    if not release.num_processes:
        return ""
    ended = "1 process" if release.num_processes == 1 else f"{release.num_processes} processes"
    what = f"{ended} ended within {release.after_s:.1f} s"
    if release.gpu_freed_bytes is None:
        return f"{what}."
    return f"{what}, {format_bytes(release.gpu_freed_bytes)} of GPU memory are free again."


def next_start(status: Status, now: datetime) -> str:
    """Return the next possible start as local time; empty where nobody can know it."""
    return format_utc(status.resumes_at_utc, now) if status.resumes_at_utc else ""
