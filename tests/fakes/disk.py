"""A folder whose system calls can be cut short: by a kill, by a power cut, or by a full disk.

The calls are real, on a real folder; `CrashingDisk` counts those that change it and stops at the
n-th. After a kill nothing runs any more, not even clean-up: every later call raises as well. What a
power cut leaves follows from what was fsynced: contents by fsync of the file, names by fsync of
their folder. Only calls through the functions of `os` are seen.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any


class KilledError(BaseException):
    """The process is gone: no handler of the program stops this."""


class Crash(Enum):
    """What is left on the disk after a kill."""

    KILL = "all that was written"
    POWER_CUT = "what was fsynced"
    POWER_CUT_NAMES_KEPT = "all names, but only fsynced content"


class CrashingDisk:
    """Stops the program at the n-th call that changes `root`; use as a context manager.

    Args:
        root: the folder; all that is in it now counts as durable.
        stop_at: number of the first call that fails, from 0; None: no call fails.
        error: errno of that call and of all later ones but unlink; None: the process is killed.
    """

    def __init__(self, root: Path, *, stop_at: int | None = None, error: int | None = None) -> None:
        self.root = root
        self.calls: list[str] = []
        """Names of the counted calls, the failed ones included."""
        self._stop_at = stop_at
        self._error = error
        self._real: dict[str, Callable[..., Any]] = {}
        self._opened: dict[int, Path] = {}
        self._num_created = 0
        self._identity: dict[Path, int] = {}
        self._synced_content: dict[int, bytes] = {}
        self._synced_names: dict[Path, dict[str, int | None]] = {}
        for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
            for file in (path for path in folder.iterdir() if path.is_file()):
                self._synced_content[self._create(file)] = file.read_bytes()
            self._sync_names(folder)

    def __enter__(self) -> CrashingDisk:
        for name in ("open", "close", "write", "fsync", "replace", "unlink", "mkdir"):
            self._real[name] = getattr(os, name)
            setattr(os, name, getattr(self, f"_{name}"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        for descriptor in self._opened:
            os.close(descriptor)

    def crash(self, crash: Crash) -> None:
        """Leave in `root` what `crash` leaves; only after the `with` block."""
        if crash is Crash.POWER_CUT_NAMES_KEPT:
            for file, identity in self._identity.items():
                file.write_bytes(self._synced_content.get(identity, b""))
        elif crash is Crash.POWER_CUT:
            shutil.rmtree(self.root)
            self._rebuild(self.root)

    def _rebuild(self, folder: Path) -> None:
        folder.mkdir()
        for name, identity in self._synced_names.get(folder, {}).items():
            if identity is None:
                self._rebuild(folder / name)
            else:
                (folder / name).write_bytes(self._synced_content.get(identity, b""))

    def _create(self, file: Path) -> int:
        self._num_created += 1
        self._identity[file] = self._num_created
        return self._num_created

    def _sync_names(self, folder: Path) -> None:
        names = {path.name: self._identity.get(path) for path in folder.iterdir()}
        self._synced_names[folder] = names

    def _count(self, name: str, before_failing: Callable[[], object] = lambda: None) -> None:
        number = len(self.calls)
        self.calls.append(name)
        if self._stop_at is None or number < self._stop_at or (self._error and name == "unlink"):
            return
        if number == self._stop_at:
            before_failing()
        if self._error is None:
            raise KilledError
        raise OSError(self._error, os.strerror(self._error))

    def _is_inside(self, path: str | Path) -> bool:
        return Path(path).is_relative_to(self.root)

    def _open(self, path: str | Path, flags: int, *args: Any, **kwargs: Any) -> int:
        is_new = bool(flags & os.O_CREAT) and self._is_inside(path) and not Path(path).exists()
        if is_new:
            self._count("open")
        descriptor: int = self._real["open"](path, flags, *args, **kwargs)
        if self._is_inside(path):
            self._opened[descriptor] = Path(path)
        if is_new:
            self._create(Path(path))
        return descriptor

    def _close(self, descriptor: int) -> None:
        self._opened.pop(descriptor, None)
        self._real["close"](descriptor)

    def _write(self, descriptor: int, data: memoryview) -> int:
        write = self._real["write"]
        if descriptor in self._opened:
            self._count("write", lambda: write(descriptor, data[: len(data) // 2]))
        written: int = write(descriptor, data)
        return written

    def _fsync(self, descriptor: int) -> None:
        path = self._opened.get(descriptor)
        if path is None:
            self._real["fsync"](descriptor)
        elif path.is_dir():
            self._count("fsync folder")
            self._sync_names(path)
        else:
            self._count("fsync")
            self._synced_content[self._identity[path]] = path.read_bytes()

    def _replace(self, source: str | Path, target: str | Path) -> None:
        if not self._is_inside(target):
            self._real["replace"](source, target)
            return
        self._count("replace")
        self._real["replace"](source, target)
        if Path(source) in self._identity:
            self._identity[Path(target)] = self._identity.pop(Path(source))

    def _unlink(self, path: str | Path, **kwargs: Any) -> None:
        if not self._is_inside(path):
            self._real["unlink"](path, **kwargs)
            return
        self._count("unlink")
        self._real["unlink"](path, **kwargs)
        self._identity.pop(Path(path), None)

    def _mkdir(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        if self._is_inside(path):
            self._count("mkdir")
        self._real["mkdir"](path, *args, **kwargs)
