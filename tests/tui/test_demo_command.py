"""`allmende demo`'s part in the command line: nothing outlives a Ctrl+C."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from tui import demo

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_the_middle_of_the_start_ends_what_was_started(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, argv: Any, **options: Any) -> None:  # noqa: ANN401 - Popen's own
            super().__init__(argv, **options)
            started.append(self)
            signal.raise_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {each: signal.getsignal(each) for each in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a worker of pytest ignores it
    monkeypatch.setattr(demo, "DEMO_COMMAND", SLEEP)
    monkeypatch.setattr("tui.demo.subprocess.Popen", Interrupted)
    try:
        assert demo.run_demo(2, 2.0, "demo", None, []) == demo.INTERRUPTED_EXIT_CODE
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    (process,) = started
    assert process.returncode == -signal.SIGTERM
