"""`python -m volunteer.agent`: one agent for one folder, until it is told to stop.

Runs in: agent. This is a process boundary: every error ends here, as one line and an exit status.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import trio

from p2p.errors import P2PError
from p2p.identity import load_or_create_identity
from volunteer.agent.app import Agent
from volunteer.agent.handover import Handover
from volunteer.agent.joined_run import choose_run
from volunteer.agent.run_data import keep_run_data
from volunteer.config import load_config
from volunteer.errors import VolunteerError
from volunteer.files import lock_folder
from volunteer.locations import Locations
from volunteer.logs import set_up_log
from volunteer.training.child_process import keep_freed_memory

log = logging.getLogger("volunteer.agent")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the agent; exit 0 when told to stop, else as the error says."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    handover = Handover.take(os.environ, os.getpid())
    # A chunk of a blob is a MiB, taken and given back: as pages of the system, a quarter of the CPU
    # of a transfer. What was imported is never garbage: to look through it again, a sixth of it.
    keep_freed_memory()
    gc.freeze()
    # Until the folder is ours, its log file may be another agent's.
    set_up_log(None, _level(options))
    try:
        _run(options, handover)
        if handover.is_wanted:
            handover.exec(sys.orig_argv)
    except (VolunteerError, P2PError) as error:
        _end_with(error)
    except ExceptionGroup as group:
        cause = _only_cause(group)
        if isinstance(cause, VolunteerError | P2PError):
            _end_with(cause)
        log.exception("the agent ended by an error of its own: please report it with this log")
        sys.exit(1)
    except Exception:
        log.exception("the agent ended by an error of its own: please report it with this log")
        sys.exit(1)
    sys.exit(0)


def _level(options: argparse.Namespace) -> int:
    return logging.DEBUG if options.debug else logging.INFO


def _end_with(error: VolunteerError | P2PError) -> NoReturn:
    hint = getattr(error, "hint", "")
    log.error("%s%s", error, f" (hint: {hint})" if hint else "")
    sys.exit(getattr(error, "exit_code", 1))


def _only_cause(error: BaseException) -> BaseException:
    """Return the error inside nurseries' groups, if it is a single one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m volunteer.agent", description=__doc__)
    parser.add_argument("--listen", action="append", metavar="MULTIADDR")
    parser.add_argument("--bootstrap", action="append", metavar="MULTIADDR")
    parser.add_argument("--no-mdns", action="store_true")
    parser.add_argument("--no-dht", action="store_true")
    parser.add_argument("--ignore-idle", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--round-s", type=float)
    parser.add_argument("--run-file", type=Path, help="a RunSpec instead of the built-in run")
    parser.add_argument("--owner-starts", action="store_true", help="a stop before is over")
    parser.add_argument("--debug", action="store_true")
    return parser.parse_args(argv)


def _run(options: argparse.Namespace, handover: Handover) -> None:
    locations = Locations.from_environment(os.environ)
    locations.prepare()
    with lock_folder(locations.data_dir):
        set_up_log(locations.log_dir / "agent.log", _level(options))
        config = load_config(
            locations.config_file,
            {
                "device": options.device,
                "threads": options.threads,
                "listen": tuple(options.listen) if options.listen else None,
                "mdns": False if options.no_mdns else None,
                "dht": False if options.no_dht else None,
                "bootstrap": tuple(options.bootstrap) if options.bootstrap else None,
            },
        )
        identity = load_or_create_identity(locations.identity_file)
        spec = choose_run(options.run_file, options.round_s)
        keep_run_data(spec, options.run_file, locations, config, identity.peer_id)
        agent = Agent(
            config=config,
            locations=locations,
            identity=identity,
            spec=spec,
            is_idle_ignored=options.ignore_idle,
            num_cores=os.cpu_count() or 1,
            is_owners_start=options.owner_starts and handover.last_restart_at_s is None,
            handover=handover,
        )
        trio.run(agent.run, strict_exception_groups=True)


if __name__ == "__main__":
    main()
