"""Which run this agent takes part in, and the rules that its RunSpec fixes.

Runs in: agent.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from volunteer.data.builtin import DEFAULT_RUN, load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.files import make_private_dir, replace_file
from volunteer.locations import Locations
from volunteer.rounds.chain import ChainRules
from volunteer.rounds.records import DENSE_MODULE, genesis_id
from volunteer.run import RunSpec, format_run_spec, read_run_spec, verify_run_spec
from volunteer.run_owner import verify_publisher, verify_round_length
from volunteer.training.layout import num_parameters


def choose_run(run_file: Path | None, round_s: float | None) -> RunSpec:
    """Return the RunSpec to take part in.

    Args:
        run_file: a RunSpec file; None for the built-in run.
        round_s: another round length in seconds: a run of one's own, with its own `run_id`.

    Raises:
        RunSpecError: not valid, or not signed by the publisher that it names.
    """
    if run_file is not None:
        spec = read_run_spec(run_file)
        source = str(run_file)
    else:
        spec = load_builtin_run(DEFAULT_RUN)
        source = f"built-in run {DEFAULT_RUN}"
    verify_publisher(spec, source=source)
    verify_round_length(spec, round_s, source=source)
    if round_s is None:
        return spec
    own = msgspec.structs.replace(
        spec,
        name=f"{spec.name}-{round_s:g}s".lower(),
        rounds=msgspec.structs.replace(spec.rounds, round_s=round_s),
    )
    try:
        # Through the same checks as a file: a flag may not make what a file may not say.
        own = msgspec.convert(msgspec.to_builtins(own), RunSpec)
    except msgspec.ValidationError as error:
        raise RunSpecError(
            f"--round-s {round_s:g}: {error}", hint="give a length from 1 to 86400 seconds"
        ) from error
    verify_run_spec(own, source="--round-s")
    return own


def verify_hardware(spec: RunSpec, ram_bytes: int, disk_free_bytes: int | None) -> None:
    """Check that this machine is what the run needs at least.

    Args:
        spec: the run.
        ram_bytes: memory of this machine.
        disk_free_bytes: free where the data lies; None: cannot tell.

    Raises:
        RunSpecError: naming what is short.
    """
    needs = spec.hardware
    short = []
    if ram_bytes < needs.ram_bytes:
        short.append(f"{needs.ram_bytes / 1e9:.1f} GB of memory ({ram_bytes / 1e9:.1f} here)")
    if disk_free_bytes is not None and disk_free_bytes < needs.disk_bytes:
        short.append(
            f"{needs.disk_bytes / 1e9:.1f} GB of free disk ({disk_free_bytes / 1e9:.1f} here)"
        )
    if short:
        raise RunSpecError(
            f"run {spec.name} needs at least " + " and ".join(short),
            hint="take part in a smaller run on this machine",
        )


def keep_run(spec: RunSpec, locations: Locations) -> Path:
    """Put the RunSpec where trainer and aggregator read it; return the run's folder."""
    for folder in (
        locations.blobs_dir(spec.run_id, DENSE_MODULE),
        locations.trainer_dir(spec.run_id, DENSE_MODULE),
    ):
        make_private_dir(folder)
    replace_file(locations.run_spec_file(spec.run_id), format_run_spec(spec).encode())
    return locations.run_dir(spec.run_id)


def chain_rules(spec: RunSpec) -> ChainRules:
    """Return what `spec` fixes for every chain of its dense module."""
    numerator, _, denominator = spec.rounds.quorum.partition("/")
    return ChainRules(
        run_id=spec.run_id,
        module_id=DENSE_MODULE,
        genesis_id=genesis_id(spec.run_id, DENSE_MODULE),
        publisher=spec.publisher,
        expiry_rounds=spec.rounds.expiry_rounds,
        demote_rounds=spec.rounds.demote_rounds,
        max_contributions=spec.rounds.max_contributions,
        quorum_numerator=int(numerator),
        quorum_denominator=int(denominator),
        journal_rounds=spec.rounds.journal_rounds,
        state_bytes=8 * num_parameters(spec.model),  # fp32 weights and momentum
        is_genesis_given=spec.genesis.is_given,
    )
