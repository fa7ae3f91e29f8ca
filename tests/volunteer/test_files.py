"""Files are the old ones or the new ones, wherever the program is stopped."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from tests.fakes.disk import Crash, CrashingDisk, KilledError
from volunteer.errors import AlreadyRunningError, StorageFullError, StorageReadOnlyError
from volunteer.files import (
    LOCK_NAME,
    drop_from_cache,
    lock_folder,
    make_private_dir,
    move_to_quarantine,
    remove_stale_temps,
    replace_file,
)

OLD, NEW = b"old" * 1000, b"new!" * 1000


def count_calls(folder: Path) -> list[str]:
    with CrashingDisk(folder) as disk:
        replace_file(folder / "file", [NEW[:100], b"", NEW[100:]])
    return disk.calls


def test_a_replaced_file_is_written_renamed_and_durable_in_this_order(tmp_path: Path) -> None:
    assert count_calls(tmp_path) == ["open", "write", "write", "fsync", "replace", "fsync folder"]
    assert (tmp_path / "file").read_bytes() == NEW
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("crash", Crash)
@pytest.mark.parametrize("stop_at", range(6))
def test_a_stop_at_any_call_leaves_the_old_file_or_the_new(
    tmp_path: Path, stop_at: int, crash: Crash
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").write_bytes(OLD)
    disk = CrashingDisk(folder, stop_at=stop_at)
    with disk, pytest.raises(KilledError):
        replace_file(folder / "file", [NEW[:100], NEW[100:]])
    disk.crash(crash)
    is_renamed = stop_at > 4 and crash is not Crash.POWER_CUT
    assert (folder / "file").read_bytes() == (NEW if is_renamed else OLD)
    remove_stale_temps(folder)
    assert os.listdir(folder) == ["file"]


@pytest.mark.parametrize("crash", Crash)
def test_a_finished_replacement_survives_a_power_cut(tmp_path: Path, crash: Crash) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with CrashingDisk(folder) as disk:
        replace_file(folder / "file", NEW)
    disk.crash(crash)
    assert (folder / "file").read_bytes() == NEW


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("stop_at", range(6))
def test_a_full_disk_leaves_a_whole_file_and_no_other(
    tmp_path: Path, stop_at: int, code: int
) -> None:
    (tmp_path / "file").write_bytes(OLD)
    with CrashingDisk(tmp_path, stop_at=stop_at, error=code), pytest.raises(StorageFullError) as e:
        replace_file(tmp_path / "file", [NEW[:100], NEW[100:]])
    assert isinstance(e.value, StorageReadOnlyError) is (code in (errno.EROFS, errno.EIO))
    assert ("no space" in str(e.value)) is not isinstance(e.value, StorageReadOnlyError)
    assert (tmp_path / "file").read_bytes() == (NEW if stop_at > 4 else OLD)
    assert os.listdir(tmp_path) == ["file"]


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "folder", NEW)
    with (
        CrashingDisk(tmp_path, stop_at=1, error=errno.EACCES),
        pytest.raises(PermissionError),
    ):
        replace_file(tmp_path / "file", NEW)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_failing_source_of_data_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        replace_file(tmp_path / "file", (b"%d" % (1 // n) for n in (1, 0)))
    assert os.listdir(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real_write(descriptor, data[:7]))
    replace_file(tmp_path / "file", NEW)
    assert (tmp_path / "file").read_bytes() == NEW


@pytest.mark.skipif(sys.platform == "win32", reason="no permission bits")
def test_new_files_and_folders_are_for_the_owner_alone(tmp_path: Path) -> None:
    make_private_dir(tmp_path / "a" / "b")
    make_private_dir(tmp_path / "a" / "b")
    replace_file(tmp_path / "a" / "b" / "key", b"secret")
    modes = [os.stat(tmp_path / name).st_mode & 0o777 for name in ("a", "a/b", "a/b/key")]
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.skipif(sys.platform != "linux", reason="the hint is Linux's")
def test_dropping_from_the_cache_is_only_a_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(NEW)
    hints: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *hint: hints.append(hint))
    drop_from_cache(file)
    drop_from_cache(file, 5)
    assert hints == [(0, 0, os.POSIX_FADV_DONTNEED), (0, 5, os.POSIX_FADV_DONTNEED)]
    assert file.read_bytes() == NEW
    drop_from_cache(tmp_path / "none")
    monkeypatch.setattr(sys, "platform", "darwin")
    drop_from_cache(file)
    assert len(hints) == 2


def test_a_file_in_the_way_of_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        make_private_dir(tmp_path / "a")


def test_only_our_own_temporary_files_are_removed(tmp_path: Path) -> None:
    stale = [".file.0123abcd.tmp", ".a.b.ffffffff.tmp"]
    others = ["file.tmp", ".file.tmp", "notes.0123abcd.tmp", ".file.0123abcd.tmp2"]
    for name in stale + others:
        (tmp_path / name).write_bytes(b"")
    assert remove_stale_temps(tmp_path) == len(stale)
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_quarantine_overwrites_nothing(tmp_path: Path) -> None:
    kept = []
    for number in (1, 2, 3):
        (tmp_path / "file").write_bytes(b"%d" % number)
        kept.append(move_to_quarantine(tmp_path / "file", tmp_path / "quarantine"))
    assert [file.read_bytes() for file in kept] == [b"1", b"2", b"3"]
    assert not (tmp_path / "file").exists()


def test_a_second_holder_is_told_who_the_first_is(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "home"):
        with (
            pytest.raises(AlreadyRunningError, match=f"process {os.getpid()} already"),
            lock_folder(tmp_path / "home"),
        ):
            pytest.fail("two holders")
        assert (tmp_path / "home" / LOCK_NAME).read_text() == f"{os.getpid()}\n"
    with lock_folder(tmp_path / "home"):
        pass


def test_a_lock_file_without_a_pid_still_locks(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        (tmp_path / LOCK_NAME).write_bytes(b"?")
        with pytest.raises(AlreadyRunningError, match="another process"), lock_folder(tmp_path):
            pytest.fail("two holders")


def test_a_pid_of_a_dead_holder_is_replaced(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("99999999999999\n")
    with lock_folder(tmp_path):
        assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()}\n"


def test_a_disk_that_has_failed_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: Path, flags: int, mode: int) -> int:
        # As ext4 does after an error: access(2) says that it may be written.
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(file))

    monkeypatch.setattr("volunteer.files.os.open", refuse)
    told = pytest.raises(StorageReadOnlyError, match="lock cannot be written: Read-only file")
    with told, lock_folder(tmp_path):
        pytest.fail("locked")


def test_a_filesystem_without_locks_is_not_another_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("volunteer.files.fcntl.flock", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)), lock_folder(tmp_path):
        pytest.fail("locked")


@pytest.mark.system
def test_a_killed_process_lets_go_of_the_lock(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from volunteer.files import lock_folder\n"
        "with lock_folder(Path(sys.argv[1])):\n"
        "    print('locked', flush=True); sys.stdin.read()\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(AlreadyRunningError, match=f"process {holder.pid} "),
            lock_folder(tmp_path),
        ):
            pytest.fail("two holders")
        holder.kill()
    with lock_folder(tmp_path):
        pass


def test_the_fake_disk_itself_can_lose_a_file(tmp_path: Path) -> None:
    """Without fsync nothing survives: else the tests above could not fail."""
    folder = tmp_path / "folder"
    numbers = count()
    for crash, left in ((Crash.POWER_CUT, None), (Crash.POWER_CUT_NAMES_KEPT, b"")):
        name = f"file{next(numbers)}"
        folder.mkdir(exist_ok=True)
        with CrashingDisk(folder) as disk:
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
            os.write(descriptor, b"data")
            os.close(descriptor)
        disk.crash(crash)
        assert ((folder / name).read_bytes() if (folder / name).exists() else None) == left
