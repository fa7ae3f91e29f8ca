"""Logs that stay small: one format, at most 4 MiB a file, one older file kept as `.1`.

Runs in: agent, trainer, aggregator, sampler.

The stderr of a process in the background *is* its log file, opened for appending by whoever started
it: what a C library or a dying interpreter prints is in it as well, and nothing waits in another
process that a kill could take. The process itself renames a file that has grown, and puts the new
one under its own stdout and stderr, so that nobody is left writing to the old one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from volunteer.files import PRIVATE_FILE_MODE

LOG_SOURCES = ("agent", "trainer", "aggregator", "sampler")
"""Whose logs there are; each is `SOURCE.log` in the log folder."""
MAX_LOG_BYTES = 4 * 1024 * 1024
MAX_RECORD_CHARS = 16 * 1024
"""A longer record is cut: a traceback fits, what a peer made long does not."""
MAX_KEPT_LINES = 500
"""In memory, while the disk is full; of more, the newest."""
LIBRARY_LINES = 30
LIBRARY_PERIOD_S = 60.0
"""All libraries together get that many lines in that time, lest they push ours out of the file."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"
_OURS = ("volunteer", "p2p", "tui", "__main__")
_STDOUT, _STDERR = 1, 2
# A peer's text must not be able to look like a line of ours.
_ESCAPES = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160))}

_log = logging.getLogger(__name__)


def set_up_log(log_file: Path | None, level: int = logging.INFO) -> None:
    """Log to `log_file`, and to stderr where that is not the same file.

    The caller is the only process that rotates `log_file`. Again replaces what was set up before.

    Args:
        log_file: None as long as it may be another's: stderr alone.
        level: the least that is logged of our own.
    """
    handlers: list[logging.Handler] = []
    has_stderr = sys.stderr is not None
    if log_file is not None:
        handler = OwnLogHandler(log_file)
        has_stderr = has_stderr and not _is_open_on(_STDERR, handler.stream)
        handlers.append(handler)
    if has_stderr:
        handlers.append(logging.StreamHandler())
    limit = LibraryLimit()
    for each in handlers:
        each.setFormatter(OneLineFormatter(_FORMAT))
        each.addFilter(limit)
    logging.basicConfig(level=level, handlers=handlers, force=True)
    # It takes itself out of the tree when imported; what it says then reaches stderr unformatted.
    libp2p = logging.getLogger("libp2p")
    libp2p.propagate = True
    libp2p.setLevel(logging.ERROR)


def older_log(log_file: Path) -> Path:
    """Name the file that `log_file` was before it grew too large."""
    return log_file.with_name(log_file.name + ".1")


def open_log(log_file: Path, max_bytes: int = MAX_LOG_BYTES) -> int:
    """Open a log for a process that is about to be started; nobody writes to it now.

    Returns:
        A descriptor for appending; the caller closes it.
    """
    if log_file.is_file() and log_file.stat().st_size > max_bytes:
        log_file.replace(older_log(log_file))
    return os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE_FILE_MODE)


class OneLineFormatter(logging.Formatter):
    """One line a record, tracebacks apart, whatever its arguments hold."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return super().formatMessage(record).translate(_ESCAPES)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line and its traceback, cut where it is too long."""
        text = super().format(record)
        return text if len(text) <= MAX_RECORD_CHARS else text[: MAX_RECORD_CHARS - 1] + "…"


class OwnLogHandler(RotatingFileHandler):
    """Writes the log of this process, and takes its stdout and stderr along when it rotates.

    What a full disk does not take is kept, up to `MAX_KEPT_LINES`, and written when there is room:
    that the disk was full is what its owner looks for there.
    """

    def __init__(self, log_file: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Open `log_file` for appending, readable by its owner alone."""
        super().__init__(
            log_file,
            maxBytes=max_bytes,
            backupCount=1,
            encoding="utf-8",
            errors="backslashreplace",
        )
        self._unwritten: deque[bytes] = deque(maxlen=MAX_KEPT_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, after those that were not written yet."""
        # Not through the stream: of what that cannot flush, nobody knows how much it has kept.
        try:
            text = self.format(record)
        except (TypeError, ValueError, KeyError):  # its arguments do not fit its message
            self.handleError(record)
            return
        self._unwritten.append(f"{text}\n".encode("utf-8", "backslashreplace"))
        with contextlib.suppress(OSError):  # the disk is full: with the next record
            if self.shouldRollover(record):
                self.doRollover()
            self.stream = self.stream or self._open()
            self._write_kept(self.stream.fileno())

    def _write_kept(self, descriptor: int) -> None:
        while self._unwritten:
            line = self._unwritten[0]
            written = os.write(descriptor, line)
            if written < len(line):
                self._unwritten[0] = line[written:]
            else:
                self._unwritten.popleft()

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        if hasattr(os, "fchmod"):
            os.fchmod(stream.fileno(), PRIVATE_FILE_MODE)
        return stream

    def doRollover(self) -> None:
        """Begin a new file; where that cannot be had, go on with the old one."""
        taken_along = [fd for fd in (_STDOUT, _STDERR) if _is_open_on(fd, self.stream)]
        with contextlib.suppress(OSError):  # e.g. a folder in the way of `.1`
            super().doRollover()
        self.stream = self.stream or self._open()
        for descriptor in taken_along:
            os.dup2(self.stream.fileno(), descriptor)


class LibraryLimit(logging.Filter):
    """Passes all that is ours, and of the libraries' records so many a period."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """Count by the clock `now_s`, seconds."""
        super().__init__()
        self._now_s = now_s
        self._began_at_s = now_s()
        self._num_seen = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to log `record`; several handlers of one record get the same answer."""
        if record.name.split(".")[0] in _OURS:
            return True
        is_kept: bool | None = record.__dict__.get("is_kept")
        if is_kept is None:
            is_kept = record.__dict__["is_kept"] = self._count()
        return is_kept

    def _count(self) -> bool:
        now_s = self._now_s()
        if now_s - self._began_at_s >= LIBRARY_PERIOD_S:
            num_lost = self._num_seen - LIBRARY_LINES
            self._began_at_s, self._num_seen = now_s, 0
            if num_lost > 0:
                _log.warning("lines=%d of libraries left out: there were too many", num_lost)
        self._num_seen += 1
        return self._num_seen <= LIBRARY_LINES


def _is_open_on(descriptor: int, stream: TextIOWrapper | None) -> bool:
    """Tell whether a descriptor of this process writes to the file of `stream`."""
    try:
        return stream is not None and os.path.sameopenfile(descriptor, stream.fileno())
    except OSError:
        return False
