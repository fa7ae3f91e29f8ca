"""Ends the trainer when the agent stands still, so that the owner has the device.

Runs in: trainer. No torch.

Who stops the agent (`kill -STOP`, Ctrl-Z, a debugger) stops what gives the device back: nobody
would see the owner come. The trainer then saves and ends, within `LOOK_EVERY_S * NUM_LOOKS` and the
time that a snapshot takes; an agent that goes on starts it again. Which is told by the exit status.

An agent that is only traced step by step (`strace`) is often seen stopped, but has run in between:
its context switches tell.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

import psutil

LOOK_EVERY_S = 1.0
NUM_LOOKS = 3
"""In a row. A family that is woken together has its trainer awake before its agent."""

_STILL = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
_log = logging.getLogger(__name__)


class Reading(NamedTuple):
    """What the system says of a process."""

    is_stopped: bool
    num_switches: int
    """Context switches of its main thread; one that stands still has no more of them."""


class ParentWatch:
    """Looks at the process that has started this one."""

    def __init__(
        self, read: Callable[[], Reading | None], request_stop: Callable[[], None]
    ) -> None:
        """Watch what `read` tells.

        Args:
            read: looks at the parent; None: it has gone.
            request_stop: called once, from another thread.
        """
        self._read = read
        self._request_stop = request_stop
        self._last: Reading | None = None
        self._num_still = 0
        self.stood_still = False
        """Whether a stop was asked for, because the parent stands still."""

    def look(self) -> bool:
        """Look once, and ask for a stop if it is time; return whether to look again."""
        reading = self._read()
        if reading is None:
            return False
        if reading.is_stopped and (self._num_still == 0 or reading == self._last):
            self._num_still += 1
        else:
            self._num_still = int(reading.is_stopped)
        self._last = reading
        if self._num_still < NUM_LOOKS:
            return True
        _log.warning("the agent stands still: saving and ending")
        self.stood_still = True
        self._request_stop()
        return False

    def start(self) -> None:
        """Look now and then, in a thread of its own, which does not keep the process alive."""
        threading.Thread(target=self._run, name="parent", daemon=True).start()

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(LOOK_EVERY_S):
            if not self.look():
                return


def parent_reader() -> Callable[[], Reading | None]:
    """Return what looks at our parent, and never at another process that gets its id later."""
    parent = psutil.Process().parent()

    def read() -> Reading | None:
        if parent is None or not parent.is_running():
            return None
        try:
            return Reading(parent.status() in _STILL, sum(parent.num_ctx_switches()))
        except psutil.Error:  # it has just ended
            return None

    return read
