"""What every child process of the agent does alike: pipes, priority, and ending in time.

Runs in: trainer. No torch.

- stdout is the protocol, and nothing else may get into it; stdin is read in a thread, so that a
  command is seen while the main thread computes.
- The end of stdin, SIGTERM or the agent's death mean: save and end. Ctrl-C in the terminal is the
  agent's affair.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import BinaryIO, Generic, TypeVar

import msgspec

from volunteer.messages import MAX_LINE_BYTES, encode_line, parse_line

CommandT = TypeVar("CommandT")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_KEPT_BYTES = 32 << 20
_KEPT_BLOCK_BYTES = 8 << 20  # a slice in fp64 has 2 MiB; larger blocks go back when freed

_AUTOGROUP = Path("/proc/self/autogroup")
_AUTOGROUP_TRIES, _AUTOGROUP_PAUSE_S = 20, 0.11

_log = logging.getLogger(__name__)


def lower_priority(niceness: int) -> None:
    """Let everything else in this session go first."""
    if hasattr(os, "nice"):
        os.nice(niceness)


def yield_to_all_sessions(niceness: int) -> None:
    """Let everything else on the machine go first, in a session of our own.

    Linux shares the CPU among sessions before it looks at niceness (autogroup, sched(7)): a trainer
    of niceness 15 took half of it from whatever the owner ran in another session. A session has a
    niceness too, which it may raise. Where sessions are not scheduled, there is no such file.
    """
    lower_priority(niceness)
    if not hasattr(os, "setsid"):
        return
    with contextlib.suppress(PermissionError):  # it leads its session already
        os.setsid()
    for _ in range(_AUTOGROUP_TRIES):
        try:
            _AUTOGROUP.write_text(f"{niceness}\n", encoding="ascii")
        except BlockingIOError:  # the kernel takes ten of these a second, of all processes
            time.sleep(_AUTOGROUP_PAUSE_S)  # noqa: TID251 -- nothing tells when it would
        except OSError as error:
            _log.debug("the session's priority is as it was reason=%s", error)
            return
        else:
            return
    _log.warning("the session's priority is as it was reason=the kernel refused for now")


def keep_freed_memory() -> None:
    """Have malloc keep up to 32 MiB of what is freed, for the next slice of a vector.

    glibc gives it back to the system at once, and the page faults of taking it anew were 60 % of
    the CPU of aggregation and outer step. Elsewhere nothing is changed.
    """
    with contextlib.suppress(OSError, AttributeError):  # a libc without mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def claim_stdout() -> BinaryIO:
    """Return a stream to the agent; whatever else prints to stdout from now on goes to the log."""
    events = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return events


class EventWriter:
    """Writes events to the agent. One thread at a time."""

    def __init__(self, stream: BinaryIO, on_closed: Callable[[], None]) -> None:
        """Write to `stream`; call `on_closed` once if nobody reads it any more."""
        self._stream = stream
        self._on_closed = on_closed
        self._is_closed = False

    def emit(self, event: msgspec.Struct) -> None:
        """Send one event; without a reader it is lost, which the snapshot makes harmless."""
        if self._is_closed:
            return
        try:
            self._stream.write(encode_line(event))
            self._stream.flush()
        except BrokenPipeError:
            _log.warning("nobody reads our events any more: ending")
            self._is_closed = True
            with contextlib.suppress(OSError):  # of what could not be flushed
                self._stream.close()
            self._on_closed()


class Inbox(Generic[CommandT]):
    """Commands of the agent, in order, and whether one of them is a stop.

    A stop that comes while the main thread computes is seen at once through `should_stop`; its
    place in the queue says what comes before it.
    """

    def __init__(self, decoder: msgspec.json.Decoder[CommandT], stop: CommandT) -> None:
        """Parse lines with `decoder`; `stop` is the command that the end of input stands for."""
        self._decoder = decoder
        self._stop = stop
        # Re-entrant: signal handlers put into it while the main thread waits on it.
        self._commands: queue.SimpleQueue[CommandT] = queue.SimpleQueue()
        self._stop_event = threading.Event()

    def should_stop(self) -> bool:
        """Tell whether a stop is in the queue."""
        return self._stop_event.is_set()

    def request_stop(self) -> None:
        """Put a stop into the queue. Safe in signal handlers and threads."""
        self.put(self._stop)

    def put(self, command: CommandT) -> None:
        """Put a command into the queue."""
        self._commands.put(command)
        if isinstance(command, type(self._stop)):
            self._stop_event.set()

    def next_command(self, *, should_wait: bool) -> CommandT | None:
        """Return the next command; None if there is none and `should_wait` is false."""
        if should_wait:
            return self._commands.get()
        try:
            return self._commands.get_nowait()
        except queue.Empty:
            return None

    def wait_command(self, timeout_s: float) -> CommandT | None:
        """Return the next command, as soon as there is one; None if none comes in time."""
        try:
            return self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def read_from(self, stream: BinaryIO) -> None:
        """Queue the commands of `stream` until its end, which is a stop. Blocks.

        A line that is no command is logged and ignored.
        """
        for line in read_lines(stream, MAX_LINE_BYTES):
            try:
                command = parse_line(line, self._decoder)
            except ValueError as error:
                _log.warning("ignored a line on stdin bytes=%d: %s", len(line), error)
                continue
            self.put(command)
        self.request_stop()

    def start_reading_stdin(self) -> None:
        """Run `read_from` in a thread of its own, which does not keep the process alive."""
        # Not sys.stdin: a thread that waits in it makes the interpreter abort when it ends.
        stream = os.fdopen(os.dup(0), "rb")
        threading.Thread(target=self.read_from, args=(stream,), name="stdin", daemon=True).start()


def read_lines(stream: BinaryIO, max_bytes: int) -> Iterator[bytes]:
    """Yield the lines of `stream`; of one that is too long, its first max_bytes + 1 bytes.

    An unfinished line at the end, which a killed writer leaves, is dropped.
    """
    while line := stream.readline(max_bytes + 1):
        rest = line
        while not rest.endswith(b"\n"):
            rest = stream.readline(max_bytes + 1)
            if not rest:
                return
        yield line


def end_with_parent(request_stop: Callable[[], None]) -> None:
    """Ask for a stop on SIGTERM and when the parent dies; ignore Ctrl-C.

    Linux sends the parent-death signal also when only the *thread* that started us ends, and the
    agent starts its children in short-lived worker threads: so the handler looks whether the
    process that is our parent has changed. Elsewhere the end of stdin has to be enough.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda _signal, _frame: request_stop())
    if sys.platform != "linux":
        return
    parent_pid = os.getppid()

    def on_parent_death(_signal: int, _frame: FrameType | None) -> None:
        if os.getppid() != parent_pid:
            request_stop()

    signal.signal(signal.SIGHUP, on_parent_death)
    with contextlib.suppress(OSError, AttributeError):  # a libc without prctl: stdin is enough
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
