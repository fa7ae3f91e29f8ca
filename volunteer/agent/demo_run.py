"""Which run a demo trains: a built-in one or a file's, made the demo's own.

Runs in: demo.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from p2p.identity import Identity
from volunteer.data.builtin import builtin_run_names, load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.run import RunSpec, read_run_spec, signed_bytes, verify_run_spec

DEFAULT_RUN = "demo"
NUM_ROUNDS = 30
"""At least so many rounds end in a demo whose run's own rounds would be longer."""
MIN_ROUND_S = 8.0
KEPT_ROUNDS = 64
"""The most that a RunSpec can ask for: nothing is pruned, so that everything can be checked from
the records afterwards."""


def choose_demo_run(name: str, *, minutes: float, round_s: float | None) -> RunSpec:
    """Return the run that `name` means, with rounds short enough to see some of them.

    Args:
        name: of a built-in run, or a RunSpec file.
        minutes: how long the demo trains.
        round_s: the length of a round, in seconds; None: the run's own, or a thirtieth of the time.

    Raises:
        RunSpecError: there is no such run, or it is not valid.
    """
    if name in builtin_run_names():
        spec = load_builtin_run(name)
    elif not Path(name).is_file():
        known = ", ".join(builtin_run_names())
        raise RunSpecError(f"--run: no run and no file is called {name!r}", hint=f"runs: {known}")
    else:
        spec = read_run_spec(Path(name))
    if round_s is None:
        round_s = min(spec.rounds.round_s, max(MIN_ROUND_S, 60.0 * minutes / NUM_ROUNDS))
    rounds = msgspec.structs.replace(
        spec.rounds, round_s=round_s, journal_rounds=KEPT_ROUNDS, target_tokens=0
    )
    return msgspec.structs.replace(spec, rounds=rounds, publisher="", signature="")


def publish(spec: RunSpec, identity: Identity) -> RunSpec:
    """Return `spec` signed by `identity`, which is its genesis roster.

    Raises:
        RunSpecError: a flag has made something of it that a file could not be.
    """
    spec = msgspec.structs.replace(spec, publisher=identity.peer_id)
    signature = identity.sign(signed_bytes(spec)).hex()
    signed = msgspec.structs.replace(spec, signature=signature)
    try:
        again = msgspec.convert(msgspec.to_builtins(signed), RunSpec)
    except msgspec.ValidationError as error:
        raise RunSpecError(f"--round-s: {error}", hint="give 1 to 86400 seconds") from error
    verify_run_spec(again, source="--run")
    return again
