"""Files as far as the system holds them in memory. Runs in: every process.

An event loop may look there itself: nothing is waited for, and a thread costs more than the work.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterable
from pathlib import Path

_CAN_READ = hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT")


def read_cached(file: Path, at: int, num_bytes: int) -> bytearray | None:
    """Read up to `num_bytes` from `at` on; None where the disk has to be asked for the first.

    Fewer come at the end of the file, and where the rest is not in memory.

    Cost: 0.1 ms for 1 MiB.
    """
    if not _CAN_READ:
        return None
    data = bytearray(num_bytes)
    try:
        with file.open("rb", buffering=0) as stream:
            num_read = os.preadv(stream.fileno(), [data], at, os.RWF_NOWAIT)
    except OSError:  # it is gone, or not in memory, or its file system knows no such question
        return None
    del data[num_read:]
    return data


class SettledFiles:
    """Files that will not be read soon, all synced: new ones take over their memory, bit by bit.

    The system has new pages for what is written anyway; but where it is a virtual machine, one that
    it has not had, or has given back to its host seconds ago, costs ten times the copy. So old ones
    are dropped as new ones are filled, and not before. Any thread may call.
    """

    def __init__(self) -> None:
        self._pieces: deque[tuple[Path, int, int]] = deque()

    def add(self, files: Iterable[Path]) -> None:
        """Let these go from now on; those before them that nothing has replaced go at once."""
        pieces: deque[tuple[Path, int, int]] = deque()
        for file in files:
            with contextlib.suppress(OSError):  # it is gone
                pieces.append((file, 0, file.stat().st_size))
        former, self._pieces = self._pieces, pieces
        with contextlib.suppress(IndexError):  # others may be taking from it
            while True:
                forget_cached(*former.popleft())

    def drop(self, num_bytes: int) -> None:
        """Have the system forget so many bytes of them, or what is left. Only a hint to it.

        Cost: 0.1 ms for 1 MiB.
        """
        while num_bytes > 0:
            try:
                file, start, end = self._pieces.popleft()
            except IndexError:
                return
            stop = min(end, start + num_bytes)
            num_bytes -= stop - start
            if stop < end:
                self._pieces.appendleft((file, stop, end))
            forget_cached(file, start, stop)


def forget_cached(file: Path, start: int, stop: int) -> None:
    """Tell the system that this part of a synced file will not be read soon."""
    if sys.platform != "linux" or start == stop:
        return
    with contextlib.suppress(OSError):  # it is gone
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
