"""The agent in its own place: the same process begins anew, and nobody finds the door shut.

Runs in: agent. The process replaces its program (exec), which gives back all memory. Its id, flags
and control socket stay: the socket that listens is handed on, so that who connects meanwhile waits
instead of finding nobody, and no second agent is started. What is handed on is one variable of the
environment, which names the process that it is meant for: no child takes it for its own.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

HANDOVER_VARIABLE = "ALLMENDE_HANDOVER"


class _HandedOn(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    """Of the process that it is meant for."""
    descriptor: int
    """Of the control socket; -1: none was open."""
    at_s: float
    """When this process began anew, on the agent's clock."""
    rss_bytes: int
    """The memory that it had then."""


class Handover:
    """What one program of this process leaves to the next."""

    def __init__(self, before: _HandedOn | None = None) -> None:
        """Begin with what the program before has left; None: there was none."""
        self._descriptor = None if before is None else before.descriptor
        self.last_restart_at_s = None if before is None else before.at_s
        """When this process last began anew, on the agent's clock; None: it has not."""
        self.last_rss_bytes = 0 if before is None else before.rss_bytes
        """The memory that it had then."""
        self._listener: socket.socket | None = None
        self._next: tuple[float, int] | None = None

    @classmethod
    def take(cls, environ: MutableMapping[str, str], pid: int) -> Handover:
        """Take what was left to the process `pid` out of its environment."""
        text = environ.pop(HANDOVER_VARIABLE, "")
        try:
            found = msgspec.json.decode(text or b"null", type=_HandedOn | None)
        except msgspec.MsgspecError:
            return cls()
        return cls(found if found is not None and found.pid == pid else None)

    def take_listener(self, socket_file: Path) -> socket.socket | None:
        """Return the socket that listens at `socket_file` already; None: there is none."""
        if self._descriptor is None:
            return None
        descriptor, self._descriptor = self._descriptor, None
        try:
            found = socket.socket(fileno=descriptor)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            if found.getsockname() == str(socket_file) and socket_file.is_socket():
                os.set_inheritable(descriptor, False)
                return found
        found.close()
        return None

    def hold(self, listener: socket.socket) -> None:
        """Keep the control socket open until it is clear whether it is handed on."""
        self._listener = listener.dup()

    @property
    def is_wanted(self) -> bool:
        """Whether another program is to follow this one."""
        return self._next is not None

    def want(self, at_s: float, rss_bytes: int) -> None:
        """Have another program follow this one, for its memory."""
        self._next = (at_s, rss_bytes)

    def cancel(self) -> None:
        """Have none follow after all: the owner wants the agent to end."""
        self._next = None

    def release(self) -> None:
        """Close what was held, unless it is handed on."""
        if self._listener is not None and not self.is_wanted:
            self._listener.close()
            self._listener = None

    def environment(self, environ: MutableMapping[str, str], pid: int) -> dict[str, str]:
        """Return the environment of the program that follows."""
        assert self._next is not None, "Invariant: only after want()"
        at_s, rss_bytes = self._next
        descriptor = -1 if self._listener is None else self._listener.fileno()
        left = _HandedOn(pid=pid, descriptor=descriptor, at_s=at_s, rss_bytes=rss_bytes)
        return {**environ, HANDOVER_VARIABLE: msgspec.json.encode(left).decode()}

    def exec(self, argv: Sequence[str]) -> NoReturn:
        """Become the program that follows, with the same arguments; every child has ended.

        Args:
            argv: as `sys.orig_argv`.

        Raises:
            OSError: the system does not let us.
        """
        environ = self.environment(os.environ, os.getpid())
        if self._listener is not None:
            self._listener.set_inheritable(True)
        os.execve(sys.executable, [sys.executable, *argv[1:]], environ)  # noqa: S606 - ourselves
