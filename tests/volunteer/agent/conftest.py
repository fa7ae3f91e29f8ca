"""Fixtures of the agent's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.fakes.members import PEOPLE, Member
from tests.fakes.neighbours import Neighbour
from tests.fakes.network import FakeNetwork
from tests.fakes.policy_world import World
from tests.fakes.virtual_time import run_threads_inline
from volunteer.agent import driver as driver_module
from volunteer.agent import policy_task as policy_module
from volunteer.agent.peer_memory import PeerMemory


@pytest.fixture
def virtual_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver's clock be trio's, and threads take no time, so that time may jump."""
    monkeypatch.setattr(driver_module, "now_s", trio.current_time)
    monkeypatch.setattr(trio.to_thread, "run_sync", run_threads_inline)


@pytest.fixture
def network() -> FakeNetwork:
    return FakeNetwork()


@pytest.fixture
def neighbours(tmp_path: Path, network: FakeNetwork) -> Iterator[list[Neighbour]]:
    made = []
    for number, who in enumerate(PEOPLE[:2]):
        member = Member(tmp_path / str(number), who)
        swarm = network.join(who.peer_id)
        made.append(Neighbour(member, swarm, PeerMemory(tmp_path / f"{number}.json")))
        made[-1].listen()
    yield made
    for neighbour in made:
        neighbour.member.log.close()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(policy_module, "now_s", trio.current_time)
    monkeypatch.setattr(trio.to_thread, "run_sync", run_threads_inline)
    return World()
