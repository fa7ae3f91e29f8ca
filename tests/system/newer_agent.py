"""An agent of another version of the protocol: python -m tests.system.newer_agent MAJOR.MINOR ARGS.

What it signs and says has more fields, and it gossips records of a kind of its own (tests/fakes/
newer.py); all else is the program's own, whose arguments ARGS are.
"""

from __future__ import annotations

import functools
import sys

from p2p.swarm import SwarmConfig
from tests.fakes import newer
from volunteer.agent import __main__ as agent_main
from volunteer.agent import app


def main(version: str, arguments: list[str]) -> None:
    major, minor = version.split(".")
    protocol = (int(major), int(minor))
    replaced = {
        "SwarmConfig": functools.partial(SwarmConfig, protocol=protocol),
        "program_name": lambda: newer.PROGRAM,
        "RecordBook": newer.NewerBook,
        "Exchange": newer.NewerExchange,
        "Heartbeat": newer.NewerHeartbeat,
    }
    for name, one in replaced.items():
        assert hasattr(app, name)
        setattr(app, name, one)
    agent_main.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
