"""Write the RunSpecs that the package ships, with the genesis hashes that the code computes.

`python packaging/make_commons.py` from the repository root rewrites volunteer/data/*.toml. A test
checks that the files agree with the code; run this after any change of layout or genesis, which
makes new runs of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from volunteer.run import (
    DataSpec,
    EvaluationSpec,
    GenesisSpec,
    HardwareSpec,
    InnerSpec,
    ModelSpec,
    OuterSpec,
    RoundSpec,
    RunSpec,
    format_run_spec,
)
from volunteer.training.genesis import genesis_hash

_UNKNOWN_HASH = "0" * 64
_DATA = DataSpec(sources=("builtin:shakespeare", "builtin:folio", "builtin:milton"))

COMMONS = RunSpec(
    name="commons",
    description=(
        "A byte-level model of Shakespeare and Milton, trained together by everyone who has "
        "nothing else to train. Small enough for any machine."
    ),
    licence="Weights: CC0-1.0. Texts: public domain.",
    model=ModelSpec(num_layers=3, dim=192, num_heads=6, ffn_dim=512, context_tokens=128),
    genesis=GenesisSpec(seed=1608, state_hash=_UNKNOWN_HASH),
    data=_DATA,
    inner=InnerSpec(lr=2e-3, decay_rounds=2000, batch_sequences=16),
    rounds=RoundSpec(round_s=600.0),
    evaluation=EvaluationSpec(num_sequences=128),
    hardware=HardwareSpec(ram_bytes=2 * 2**30, disk_bytes=2**30),
)

DEMO = RunSpec(
    name="demo",
    description="Small and fast: what `allmende demo` trains, so that a swarm is seen at work.",
    licence="Weights: CC0-1.0. Texts: public domain.",
    model=ModelSpec(num_layers=2, dim=96, num_heads=4, ffn_dim=320, context_tokens=64),
    genesis=GenesisSpec(seed=1667, state_hash=_UNKNOWN_HASH),
    data=_DATA,
    inner=InnerSpec(lr=3e-3, decay_rounds=12, batch_sequences=8),
    # From the genesis on, momentum keeps a small model longer where it first comes to rest
    # (LOGBOOK.md, 2026-11-30).
    outer=OuterSpec(momentum_warmup_rounds=8),
    rounds=RoundSpec(round_s=8.0, min_grace_s=1.0),
    evaluation=EvaluationSpec(num_sequences=128),
)


def with_genesis_hash(spec: RunSpec) -> RunSpec:
    """Return `spec` with the genesis hash that the code computes."""
    genesis = msgspec.structs.replace(spec.genesis, state_hash=genesis_hash(spec))
    return msgspec.structs.replace(spec, genesis=genesis)


def main(data_dir: Path) -> None:
    """Write the files."""
    for spec in (COMMONS, DEMO):
        complete = with_genesis_hash(spec)
        file = data_dir / f"{spec.name}.toml"
        file.write_text(
            "# Written by packaging/make_commons.py; a change of any value makes another run.\n"
            + format_run_spec(complete),
            "utf-8",
        )
        print(f"{file}: run {complete.run_id}")


if __name__ == "__main__":
    root_dir = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(root_dir))
    main(root_dir / "volunteer" / "data")
