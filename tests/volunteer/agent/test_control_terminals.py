"""Who talks to the agent is told, so that typing `allmende status` is no use of the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import trio

from volunteer.agent import control
from volunteer.agent.control import serve_control
from volunteer.messages import ControlRequest, encode_line

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who connects")


def test_clients_are_told_as_they_come_and_while_they_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "WATCH_EVERY_S", 0.01)
    told: list[int] = []

    async def status(args: Mapping[str, Any]) -> object:
        await trio.lowlevel.checkpoint()
        return {"state": "waiting"}

    async def main() -> None:
        file = tmp_path / "control.sock"
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, file, {"status": status}, told.append)
            async with await trio.open_unix_socket(str(file)) as client:
                await client.send_all(encode_line(ControlRequest(verb="status")))
                assert await client.receive_some(4096)
                assert told == [os.getpid()]
            async with await trio.open_unix_socket(str(file)) as client:
                await client.send_all(encode_line(ControlRequest(verb="watch")))
                while len(told) < 5:
                    assert await client.receive_some(4096)
            nursery.cancel_scope.cancel()
        assert set(told) == {os.getpid()}

    trio.run(main)
