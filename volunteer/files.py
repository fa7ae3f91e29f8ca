"""Files that are either the old ones or the new ones, and folders that one process uses at a time.

Runs in: every process.

A file is replaced in four steps: write a temporary file in the same folder, fsync it, rename it
over the old one, fsync the folder. A kill between any two leaves the old or the new file, and
perhaps a temporary one that `remove_stale_temps` takes away. A full disk is told as
StorageFullError, one that can no longer be written to as StorageReadOnlyError; every other failure
stays an OSError.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from volunteer.errors import AlreadyRunningError, StorageFullError, StorageReadOnlyError

if sys.platform == "win32":  # pragma: no cover
    import msvcrt
else:
    import fcntl

PRIVATE_FILE_MODE = 0o600
PRIVATE_DIR_MODE = 0o700
LOCK_NAME = "lock"

_FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_READ_ONLY_ERRNOS = frozenset({errno.EROFS, errno.EIO})
"""Linux makes a file system that it finds damaged read-only."""
_BINARY: int = getattr(os, "O_BINARY", 0)  # Windows would turn every \n into \r\n
_TEMP_NAME = re.compile(r"^\..+\.[0-9a-f]{8}\.tmp$")
# Windows locks bytes, and locked bytes cannot be read: far behind the pid, which should be.
_LOCKED_BYTE = 1 << 30


def replace_file(
    file: Path, data: bytes | Iterable[bytes], *, mode: int = PRIVATE_FILE_MODE
) -> None:
    """Replace `file`, or create it, so that a kill leaves the old content or the new.

    Args:
        file: its folder must exist.
        data: the content, whole or in pieces.
        mode: permissions of the new file, before the umask.

    Raises:
        StorageFullError: the disk or the quota is full; the old file is untouched.
        OSError: anything else the system refuses; the old file is untouched, unless only the
            last fsync of the folder failed.
    """
    temp = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
    with telling_full_disk(file):
        try:
            _write_file(temp, (data,) if isinstance(data, bytes) else data, mode)
            os.replace(temp, file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
        fsync_dir(file.parent)


@contextlib.contextmanager
def telling_full_disk(file: Path) -> Iterator[None]:
    """Turn the errors of a full disk, and of a broken one, into those that the user understands.

    Raises:
        StorageFullError: in place of an OSError with ENOSPC or EDQUOT.
        StorageReadOnlyError: in place of one with EROFS or EIO.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _READ_ONLY_ERRNOS:
            raise StorageReadOnlyError(f"{file} cannot be written: {error.strerror}") from error
        if error.errno not in _FULL_ERRNOS:
            raise
        raise StorageFullError(f"no space left to write {file}") from error


def fsync_file(file: Path) -> None:
    """Put the content of `file`, whoever wrote it, on the disk."""
    # Windows flushes only handles that may write.
    descriptor = os.open(file, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)
    try:
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_from_cache(file: Path, end: int = 0) -> None:
    """Tell the system that `file`, which was synced, will not be read soon.

    Its memory is then there for the owner's files, and for the next one of ours. Only a hint, and
    only where the system knows it.

    Args:
        file: which; nothing happens where it is gone.
        end: only the bytes before that; 0: all.
    """
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, end, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def fsync_dir(folder: Path) -> None:
    """Put the names in `folder` on the disk; Windows does so by itself."""
    if sys.platform == "win32":  # pragma: no cover
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def make_private_dir(folder: Path) -> None:
    """Create `folder` and its parents, for the owner alone; an existing folder stays as it is."""
    if folder.is_dir():
        return
    make_private_dir(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, PRIVATE_DIR_MODE)
        fsync_dir(folder.parent)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the folder", str(folder))


def remove_stale_temps(folder: Path) -> int:
    """Remove what killed calls of `replace_file` left in `folder`; return how many there were.

    Only for the one process that writes to the folder: a temporary file in use looks the same.
    """
    stale = [entry.path for entry in os.scandir(folder) if _TEMP_NAME.match(entry.name)]
    for temp in stale:
        os.unlink(temp)
    return len(stale)


def move_to_quarantine(file: Path, quarantine_dir: Path) -> Path:
    """Move a damaged file, or whatever lies in its place, out of the way; return where it is now.

    Nothing that is there already is overwritten: the name gets a number.
    """
    make_private_dir(quarantine_dir)
    target, number = quarantine_dir / file.name, 0
    while os.path.lexists(target):
        number += 1
        target = quarantine_dir / f"{file.name}.{number}"
    os.replace(file, target)
    fsync_dir(quarantine_dir)
    fsync_dir(file.parent)
    return target


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process alone; the system lets go when the process ends, however.

    The lock file stays: removing it would let two processes hold two files of the same name.

    Raises:
        AlreadyRunningError: another process holds it; the message names its pid.
        StorageFullError: not even the pid can be written.
        StorageReadOnlyError: the disk takes no writes, or fails.
        OSError: the folder cannot be locked at all.
    """
    flags = os.O_RDWR | os.O_CREAT | _BINARY
    with telling_full_disk(folder / LOCK_NAME):
        make_private_dir(folder)
        descriptor = os.open(folder / LOCK_NAME, flags, PRIVATE_FILE_MODE)
    try:
        is_held = _try_lock(descriptor)
        os.lseek(descriptor, 0, os.SEEK_SET)
        if not is_held:
            pid = os.read(descriptor, 32).decode("ascii", "replace").strip()
            holder = f"process {pid}" if pid.isdecimal() else "another process"
            raise AlreadyRunningError(f"{holder} already uses {folder}")
        with telling_full_disk(folder / LOCK_NAME):
            os.ftruncate(descriptor, 0)
            _write_all(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def turn_in_folder(folder: Path) -> Iterator[None]:
    """Wait for a turn in `folder`, so that two who read, change and write a file do not overlap.

    Nothing is left behind: what is locked is the folder itself. Windows cannot, and does not.

    Raises:
        OSError: there is no such folder.
    """
    if sys.platform == "win32":  # pragma: no cover
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_file(file: Path, pieces: Iterable[bytes], mode: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, mode)
    try:
        for piece in pieces:
            _write_all(descriptor, piece)
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _fsync(descriptor: int) -> None:
    if sys.platform == "darwin":  # pragma: no cover
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)  # its fsync stops at the drive's cache
    else:
        os.fsync(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Take the lock if it is free; return whether this process has it now."""
    try:
        if sys.platform == "win32":  # pragma: no cover
            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.EDEADLK):
            return False
        raise
    return True
