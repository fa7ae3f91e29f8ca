"""`allmende logs`: the ends of the logs, merged by time, and what is written from now on.

Runs in: the command line. Files alone: it works without an agent, and across its restarts and the
rotation of its files (volunteer/logs.py). What is shown is cleaned: a peer may have chosen it.
"""

from __future__ import annotations

import heapq
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tui.wording import clean
from volunteer.errors import NoAgentError, VolunteerError
from volunteer.logs import LOG_SOURCES, MAX_LOG_BYTES, older_log

FOLLOW_EVERY_S = 0.25
MAX_SHOWN_CHARS = 4000
_MAX_READ_BYTES = 2 * MAX_LOG_BYTES
# A file that a C library has flooded is larger than its cap until its owner logs the next line.
_STAMP = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}(?= )")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one log."""

    stamp: str
    """Local time as it is written; a line without one (in a traceback) has that before it."""
    source: str
    text: str
    """Safe to show."""


class LogFollower:
    """Reads one log: its end, then what is added, wherever its file is moved to.

    Invariant: the file read last stays open, so its number cannot become another file's.
    """

    def __init__(self, source: str, log_file: Path) -> None:
        """Read nothing yet; the file need not exist."""
        self._source = source
        self._log_file = log_file
        self._stream: BinaryIO | None = None
        self._older_key: tuple[int, int] | None = None
        self._rest = b""
        self._stamp = ""

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def last_lines(self, num_lines: int) -> list[LogLine]:
        """Return the last lines, those of the older file included; `new_lines` goes on there."""
        data = b""
        if self._open():
            data = self._read_end()
        if data.count(b"\n") < num_lines and not self._is_older_file_ours():
            data = _read_end_of(older_log(self._log_file)) + data
        lines = self._split(data)
        return lines[len(lines) - min(num_lines, len(lines)) :]

    def new_lines(self) -> list[LogLine]:
        """Return the lines that were finished since the last call."""
        data = self._read_on()
        if self._has_moved():
            # Nobody writes to the old file after the new one is there.
            data += self._read_on()
            data += b"\n" if self._rest + data and not (self._rest + data).endswith(b"\n") else b""
            data += self._missed_file()
            self._open()
            data += self._read_on()
        return self._split(data)

    def unfinished_line(self) -> list[LogLine]:
        """Return what stands after the last line's end."""
        return self._split(b"\n") if self._rest else []

    def _open(self) -> bool:
        self.close()
        self._older_key = _key_of(older_log(self._log_file))
        try:
            self._stream = self._log_file.open("rb")
        except FileNotFoundError:
            return False
        return True

    def _read_end(self) -> bytes:
        assert self._stream is not None
        size_bytes = os.fstat(self._stream.fileno()).st_size
        start = max(0, size_bytes - _MAX_READ_BYTES)
        self._stream.seek(start)
        data = self._stream.read(_MAX_READ_BYTES)
        return data.partition(b"\n")[2] if start else data

    def _read_on(self) -> bytes:
        if self._stream is None:
            return b""
        if os.fstat(self._stream.fileno()).st_size < self._stream.tell():
            self._stream.seek(0)  # somebody has emptied it
        return self._stream.read()

    def _has_moved(self) -> bool:
        """Tell whether another file than the one read has the log's name."""
        now = _key_of(self._log_file)
        return now is not None and now != self._own_key()

    def _own_key(self) -> tuple[int, int] | None:
        if self._stream is None:
            return None
        status = os.fstat(self._stream.fileno())
        return status.st_dev, status.st_ino

    def _is_older_file_ours(self) -> bool:
        """Tell whether the file that is read was moved since it was opened."""
        own_key = self._own_key()
        return own_key is not None and own_key == _key_of(older_log(self._log_file))

    def _missed_file(self) -> bytes:
        """Return the older file if it came and went since the last look."""
        key = _key_of(older_log(self._log_file))
        is_known = self._stream is None or key in (None, self._own_key(), self._older_key)
        return b"" if is_known else _read_end_of(older_log(self._log_file))

    def _split(self, data: bytes) -> list[LogLine]:
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_READ_BYTES:
            whole, self._rest = [*whole, self._rest], b""
        return [self._line(raw) for raw in whole if raw.strip()]

    def _line(self, raw: bytes) -> LogLine:
        text = raw.decode("utf-8", errors="replace").rstrip()
        stamp = _STAMP.match(text)
        if stamp is not None:
            self._stamp = stamp[0]
        return LogLine(self._stamp, self._source, clean(text, limit=MAX_SHOWN_CHARS))


def show_logs(log_dir: Path, num_lines: int, source: str | None, *, is_following: bool) -> None:
    """Print the end of the logs, and with `is_following` what is added until Ctrl+C.

    Args:
        log_dir: where they are.
        num_lines: how many at most.
        source: one of LOG_SOURCES; None: all of them, by time.
        is_following: go on.

    Raises:
        VolunteerError: there is nothing to print, and nothing to wait for.
    """
    sources = LOG_SOURCES if source is None else (source,)
    followers = [LogFollower(name, log_dir / f"{name}.log") for name in sources]
    try:
        lines = last_lines(followers, num_lines, is_following=is_following)
        if not (is_following or lines or any(log_dir.glob("*.log"))):
            raise VolunteerError(f"no log is in {log_dir} yet", hint=NoAgentError.hint)
        _show(lines, has_source=source is None)
        while is_following:
            time.sleep(FOLLOW_EVERY_S)  # noqa: TID251 - files do not tell that they have grown
            _show(
                merge([follower.new_lines() for follower in followers]), has_source=source is None
            )
    except KeyboardInterrupt:
        return
    finally:
        for follower in followers:
            follower.close()


def _show(lines: Iterable[LogLine], *, has_source: bool) -> None:
    sys.stdout.write("".join(f"{format_line(line, has_source=has_source)}\n" for line in lines))
    sys.stdout.flush()


def merge(logs: Iterable[Sequence[LogLine]]) -> Iterator[LogLine]:
    """Yield the lines of all logs by time; each log's own order stays."""
    return heapq.merge(*logs, key=lambda line: line.stamp)


def last_lines(
    followers: Sequence[LogFollower], num_lines: int, *, is_following: bool
) -> list[LogLine]:
    """Return the last lines of all logs together.

    Args:
        followers: one a log, which have read nothing yet.
        num_lines: how many at most.
        is_following: leave a line that is just being written to `new_lines`.
    """
    ends = [follower.last_lines(num_lines) for follower in followers]
    if not is_following:
        ends = [
            end + follower.unfinished_line() for end, follower in zip(ends, followers, strict=True)
        ]
    lines = list(merge(ends))
    return lines[len(lines) - min(num_lines, len(lines)) :]


def format_line(line: LogLine, *, has_source: bool) -> str:
    """Return the line as it is shown; with its source where several are."""
    return f"{line.source:<10}  {line.text}" if has_source else line.text


def _key_of(file: Path) -> tuple[int, int] | None:
    """Return what tells a file from another of the same name."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _read_end_of(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _MAX_READ_BYTES))
            return stream.read(_MAX_READ_BYTES)
    except FileNotFoundError:
        return b""
