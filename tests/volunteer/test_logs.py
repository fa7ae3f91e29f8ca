"""Logs stay below their cap, lose no line on the way, and say nothing in a peer's name."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from volunteer.logs import (
    LIBRARY_LINES,
    LIBRARY_PERIOD_S,
    MAX_KEPT_LINES,
    MAX_RECORD_CHARS,
    LibraryLimit,
    OneLineFormatter,
    OwnLogHandler,
    older_log,
    open_log,
    set_up_log,
)

ROOT = Path(__file__).parents[2]
HEAD = """
import logging, os, sys
from pathlib import Path
from volunteer import logs
logs.OwnLogHandler.__init__.__defaults__ = (10_000,)
log = logging.getLogger("volunteer.test")
"""


def run(script: str, log_file: Path, *, is_log_stderr: bool = True) -> subprocess.Popen[bytes]:
    """Start a process whose stdout and stderr are its log, as the agent's are."""
    descriptor = open_log(log_file)
    output = descriptor if is_log_stderr else subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + script, str(log_file)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=output,
        stderr=output,
    )
    os.close(descriptor)
    return process


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The root logger, and all of its settings back afterwards."""
    root, libp2p = logging.getLogger(), logging.getLogger("libp2p")
    before = root.handlers[:], root.level, libp2p.level, libp2p.propagate
    root.handlers = []  # so that pytest's are not closed
    yield root
    for handler in root.handlers:
        handler.close()
    root.handlers, level, libp2p_level, libp2p.propagate = before
    root.setLevel(level)
    libp2p.setLevel(libp2p_level)


@pytest.mark.system
def test_a_process_keeps_its_log_small_and_loses_no_line_of_any_writer(tmp_path: Path) -> None:
    log_file = tmp_path / "agent.log"
    script = """
logs.set_up_log(Path(sys.argv[1]))
for i in range(130):
    log.info("record=%03d %s", i, "x" * 60)
    os.write(2, b"stderr=%03d\\n" % i)
    os.write(1, b"stdout=%03d\\n" % i)
"""
    assert run(script, log_file).wait(30) == 0
    new, old = log_file.read_text(), older_log(log_file).read_text()
    for kind in ("record", "stderr", "stdout"):
        numbers = [int(n) for n in re.findall(rf"{kind}=(\d+)", old + new)]
        assert numbers == list(range(130)), f"{kind}: one writer, one order, nothing lost"
        assert re.search(f"{kind}=", new), "they were all taken along"
    assert 9_000 < len(old) < 10_100
    assert len(new) < 10_100
    assert {file.name for file in tmp_path.iterdir()} == {"agent.log", "agent.log.1"}


@pytest.mark.system
def test_a_kill_takes_no_line_that_was_logged(tmp_path: Path) -> None:
    log_file = tmp_path / "trainer.log"
    script = f"""
logs.set_up_log(Path(sys.argv[1]))
for i in range(200):
    log.info("record=%03d %s", i, "x" * 60)
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""
    assert run(script, log_file).wait(30) == -signal.SIGKILL
    text = log_file.read_text()
    assert text.endswith("record=199 " + "x" * 60 + "\n")


@pytest.mark.system
def test_the_last_words_of_an_interpreter_are_in_the_rotated_log(tmp_path: Path) -> None:
    log_file = tmp_path / "agent.log"
    script = """
logs.set_up_log(Path(sys.argv[1]))
for i in range(130):
    log.info("record=%03d %s", i, "x" * 60)
raise SystemError("the very end")
"""
    assert run(script, log_file).wait(30) == 1
    assert log_file.read_text().endswith("SystemError: the very end\n")


@pytest.mark.system
def test_in_the_foreground_the_terminal_and_the_file_get_every_line_once(tmp_path: Path) -> None:
    log_file = tmp_path / "agent.log"
    script = """
logs.set_up_log(None)
log.info("not ours yet")
logs.set_up_log(Path(sys.argv[1]))
log.info("ours now")
"""
    process = run(script, log_file, is_log_stderr=False)
    output, errors = process.communicate(timeout=30)
    assert output == b""
    assert errors.count(b"not ours yet") == errors.count(b"ours now") == 1
    assert "not ours yet" not in log_file.read_text()
    assert log_file.read_text().count("ours now") == 1


def test_a_log_is_its_owners_alone(tmp_path: Path) -> None:
    os.close(open_log(tmp_path / "a.log"))
    handed_down = tmp_path / "b.log"
    handed_down.touch(mode=0o644)
    handler = OwnLogHandler(handed_down, max_bytes=50)
    for _ in range(3):
        handler.emit(logging.makeLogRecord({"msg": "x" * 40}))
    handler.close()
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == {"a.log": 0o600, "b.log": 0o600, "b.log.1": 0o600}


def test_where_it_cannot_be_rotated_the_log_goes_on(tmp_path: Path) -> None:
    log_file = tmp_path / "a.log"
    (older_log(log_file) / "in the way").mkdir(parents=True)
    handler = OwnLogHandler(log_file, max_bytes=50)
    for i in range(5):
        handler.emit(logging.makeLogRecord({"msg": f"{i} " + "x" * 40}))
    handler.close()
    assert [line[0] for line in log_file.read_text().splitlines()] == list("01234")


def test_what_a_full_disk_did_not_take_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_file = tmp_path / "agent.log"
    handler = OwnLogHandler(log_file)
    logger = logging.Logger("volunteer.test")
    logger.addHandler(handler)
    logger.info("before")
    real_write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if data.startswith(b"first"):
            return real_write(descriptor, data[:3])  # what there was room for
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for word in ("first", "second", "third"):
            logger.info(word)
        for number in range(MAX_KEPT_LINES - 4):
            logger.info("%d", number)
    assert log_file.read_text() == "before\nfir"
    logger.info("after")
    lines = log_file.read_text().splitlines()
    handler.close()
    assert lines[:4] == ["before", "first", "second", "third"]
    assert lines[-2:] == [str(MAX_KEPT_LINES - 5), "after"]
    assert len(lines) == MAX_KEPT_LINES + 1


def test_a_record_that_cannot_be_formatted_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = OwnLogHandler(tmp_path / "agent.log")
    logger = logging.Logger("volunteer.test")
    logger.addHandler(handler)
    logger.info("%d", "text")
    handler.close()
    assert "Logging error" in capsys.readouterr().err


def test_a_log_that_was_left_large_is_started_anew(tmp_path: Path) -> None:
    log_file = tmp_path / "a.log"
    log_file.write_text("x" * 11)
    older_log(log_file).write_text("oldest")
    os.close(open_log(log_file, 11))
    assert log_file.read_text() == "x" * 11
    os.close(open_log(log_file, 10))
    assert log_file.read_text() == ""
    assert older_log(log_file).read_text() == "x" * 11


def test_text_of_a_peer_cannot_look_like_a_line_of_ours() -> None:
    formatter = OneLineFormatter("%(levelname)s %(message)s")
    record = logging.makeLogRecord(
        {"levelname": "INFO", "msg": "peer says %s", "args": ("a\nERROR forged\x1b[2J\x9b",)}
    )
    assert formatter.format(record) == r"INFO peer says a\x0aERROR forged\x1b[2J\x9b"


def test_a_traceback_keeps_its_lines_and_a_long_record_is_cut() -> None:
    formatter = OneLineFormatter("%(message)s")
    try:
        raise ValueError("of three lines")
    except ValueError:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": sys.exc_info()})
    lines = formatter.format(record).splitlines()
    assert (lines[0], lines[-1]) == ("failed", "ValueError: of three lines")
    long = formatter.format(logging.makeLogRecord({"msg": "x" * 10 * MAX_RECORD_CHARS}))
    assert len(long) == MAX_RECORD_CHARS
    assert long.endswith("x…")


def test_libraries_cannot_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [100.0]
    limit = LibraryLimit(lambda: now_s[0])

    def passes(name: str) -> bool:
        return limit.filter(logging.makeLogRecord({"name": name, "msg": "x"}))

    kept = [passes(f"libp2p.stream{i}") for i in range(LIBRARY_LINES + 7)]
    assert kept == [True] * LIBRARY_LINES + [False] * 7
    assert passes("volunteer.agent.driver")
    assert passes("p2p.swarm")
    assert not passes("p2pmalicious")
    now_s[0] += LIBRARY_PERIOD_S - 0.1
    assert not passes("libp2p")
    now_s[0] += 0.1
    assert passes("libp2p")
    assert caplog.messages == ["lines=9 of libraries left out: there were too many"]


def test_two_handlers_of_one_record_get_one_answer() -> None:
    limit = LibraryLimit(lambda: 0.0)
    records = [logging.makeLogRecord({"name": "libp2p"}) for _ in range(LIBRARY_LINES + 1)]
    first = [limit.filter(record) for record in records]
    assert [limit.filter(record) for record in records] == first
    assert sum(first) == LIBRARY_LINES


def test_libp2p_is_heard_from_error_on_in_our_format(
    tmp_path: Path, root_logger: logging.Logger
) -> None:
    libp2p = logging.getLogger("libp2p")
    libp2p.propagate = False  # as it leaves itself when imported
    set_up_log(tmp_path / "agent.log")
    logging.getLogger("libp2p.host").warning("chatter")
    logging.getLogger("libp2p.host").error("a stream broke")
    logging.getLogger("volunteer.agent").info("run=%s", "r")
    lines = (tmp_path / "agent.log").read_text().splitlines()
    assert [re.sub(r"^[-\d]+ [:,\d]+ ", "", line) for line in lines] == [
        "ERROR libp2p.host a stream broke",
        "INFO volunteer.agent run=r",
    ]
