"""What strangers write reaches a terminal as text alone."""

from __future__ import annotations

from volunteer.printable import MAX_CHARS, printable

STEERING = "a\x1b[2Jb\x07\u202ec\udcff\r\x9b"


def test_nothing_steers_a_terminal_and_lines_stay() -> None:
    assert printable(STEERING) == r"a\x1b[2Jb\x07\u202ec\udcff\r\x9b"
    assert printable("one\ntwö 三") == "one\ntwö 三"
    assert len(printable("x" * 10**6)) == MAX_CHARS + 3
