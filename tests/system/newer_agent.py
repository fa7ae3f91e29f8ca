"""An agent of another version of the protocol: python -m tests.system.newer_agent MAJOR.MINOR ARGS.

What it signs and says has more fields, and it gossips records of a kind of its own (tests/fakes/
newer.py); all else is the program's own, whose arguments ARGS are.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType

from p2p.swarm import SwarmConfig
from tests.fakes import newer
from volunteer.agent import __main__ as agent_main
from volunteer.agent import app, parts


def replacements(version: str) -> list[tuple[ModuleType, str, object]]:
    """Return what an agent of version MAJOR.MINOR has in place of ours: where, its name, and it."""
    major, minor = version.split(".")
    return [
        (app, "SwarmConfig", functools.partial(SwarmConfig, protocol=(int(major), int(minor)))),
        (app, "program_name", lambda: newer.PROGRAM),
        (parts, "RecordBook", newer.NewerBook),
        (parts, "Exchange", newer.NewerExchange),
        (parts, "Heartbeat", newer.NewerHeartbeat),
    ]


def main(version: str, arguments: list[str]) -> None:
    for module, name, one in replacements(version):
        assert hasattr(module, name)
        setattr(module, name, one)
    agent_main.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
