"""A real disk that is really small, where the system lets us mount one."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted_tiny_disk(mount_dir: Path, *, size_kib: int) -> Iterator[Path]:
    """Mount a tmpfs at `mount_dir`; skip the test where that is not allowed."""
    mount_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(mount_dir)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a disk")
    try:
        yield mount_dir
    finally:
        # Lazy: a file that a failed test left open must not keep the mount.
        subprocess.run(["umount", "--lazy", str(mount_dir)], check=True)
