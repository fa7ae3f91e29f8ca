"""The one place where any exception is caught. Runs in: agent.

libp2p ends the whole host for one exception in a task of its own. Everything that strangers' bytes
or a caller's callback can make raise runs inside `contain`: the boundary that STYLE.md asks for.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVarTuple

from p2p.errors import P2PError

QUIET_S: Final = (
    10.0  # between two warnings of the same kind, so that nobody can fill the disk with log
)
MAX_ERROR_CHARS: Final = 300

Args = TypeVarTuple("Args")
_log = logging.getLogger("p2p")
_warned_at: dict[str, float] = {}


class Outcome:
    """What became of the block inside `contain`."""

    error: Exception | None = None


@contextlib.contextmanager
def contain(
    what: str, *, peer_id: str = "", level: int = logging.WARNING, is_quiet: bool = True
) -> Iterator[Outcome]:
    """Run the block; an exception in it is logged and kept in the outcome. Cancellation passes.

    Args:
        what: What is being done, for the log; one of few.
        peer_id: With whom.
        level: How bad it is.
        is_quiet: Log the same kind at most once in 10 s at this level.
    """
    outcome = Outcome()
    try:
        yield outcome
    except Exception as error:  # noqa: BLE001 -- the boundary: see above
        outcome.error = error
        text = repr(error)[:MAX_ERROR_CHARS]
        chosen = _level_of(what, error, level) if is_quiet else level
        has_traceback = chosen >= logging.ERROR
        _log.log(
            chosen,
            "contained what=%s peer=%s error=%s",
            what,
            peer_id,
            text,
            exc_info=has_traceback,
        )


def call_all(what: str, callbacks: Sequence[Callable[[*Args], None]], *args: *Args) -> int:
    """Call the caller's callbacks, whatever they raise.

    Returns:
        How many of them failed.
    """
    num_failed = 0
    for callback in callbacks:
        with contain(what) as outcome:
            callback(*args)
        num_failed += outcome.error is not None
    return num_failed


def _level_of(what: str, error: Exception, level: int) -> int:
    """Lower the level of what strangers can cause at will."""
    now = time.monotonic()
    if isinstance(error, P2PError) or now - _warned_at.get(what, -QUIET_S) < QUIET_S:
        return logging.DEBUG
    _warned_at[what] = now
    return level
