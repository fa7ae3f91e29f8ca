"""Which files a glob or a folder means, and what is in them: told by a hash of their content.

Runs in: trainer. Hashing reads a file once; as long as its size, inode and times stay, it is not
read again. Messages never name a private file.
"""

from __future__ import annotations

import contextlib
import glob
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from volunteer.files import replace_file
from volunteer.training.sources.documents import SUFFIXES

MAX_FILES = 10_000
_BLOCK_BYTES = 4 * 2**20
_SETTLED_NS = 2 * 10**9
"""What was changed a moment ago may change again within its time stamp: it is hashed each time."""

Stamp = tuple[int, int, int, int]
"""Size, inode, and both times in nanoseconds."""


def files_of_glob(pattern: str) -> list[Path]:
    """Return the files of known kinds that `pattern` matches, in order; `**` is any folders."""
    found = glob.iglob(os.path.expanduser(pattern), recursive=True)
    return _chosen(Path(name) for name in found)


def has_text(folder: Path) -> bool:
    """Tell whether there is any file of a known kind below `folder`."""
    names = (name for _, _, names in os.walk(folder) for name in names)
    return any(os.path.splitext(name)[1].lower() in SUFFIXES for name in names)


def files_of_folder(folder: Path) -> list[Path]:
    """Return the files of known kinds below `folder`, in order, but no links out of it."""
    inside = folder.resolve()
    found = (Path(base) / name for base, _, names in os.walk(inside) for name in names)
    return [file for file in _chosen(found) if file.resolve().is_relative_to(inside)]


def _chosen(files: Iterator[Path]) -> list[Path]:
    wanted = (file for file in files if file.suffix.lower() in SUFFIXES and file.is_file())
    return sorted(wanted)[:MAX_FILES]


class ContentHashes:
    """Hashes of files, remembered."""

    def __init__(self, file: Path) -> None:
        """Read what was remembered in `file`."""
        self._file = file
        self._known: dict[str, tuple[Stamp, str]] = {}
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            self._known = msgspec.json.decode(file.read_bytes(), type=dict[str, tuple[Stamp, str]])
        self._used: set[str] = set()

    def hash_of(self, file: Path, tell: Callable[[], None]) -> str:
        """Return the blake3 hash of a file's content.

        Args:
            file: to hash.
            tell: called from time to time.

        Raises:
            OSError: it cannot be read.
        """
        # As its bytes: a name need not be text that JSON could hold.
        name, stamp = os.fsencode(file).decode("latin-1"), _stamp(file)
        self._used.add(name)
        known = self._known.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        hasher = blake3()
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                hasher.update(block)
                tell()
        content_hash: str = hasher.hexdigest()
        if _stamp(file) == stamp and time.time_ns() - max(stamp[2:]) > _SETTLED_NS:
            self._known[name] = (stamp, content_hash)
        return content_hash

    def save(self) -> None:
        """Keep what was used.

        Raises:
            StorageFullError: what was remembered stands.
        """
        kept = {name: known for name, known in self._known.items() if name in self._used}
        replace_file(self._file, msgspec.json.encode(kept))


def _stamp(file: Path) -> Stamp:
    status = file.stat()
    return (status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns)
