"""A machine that is asked for the first time."""

from __future__ import annotations

from volunteer.config import Config
from volunteer.data.builtin import DEFAULT_RUN, load_builtin_run
from volunteer.first_run import Plan
from volunteer.locations import HOME_VARIABLE, Locations


def make_plan(locations: Locations | None = None) -> Plan:
    """Return the plan of a desktop with one GPU."""
    return Plan(
        config=Config(),
        spec=load_builtin_run(DEFAULT_RUN),
        gpus=("NVIDIA GeForce RTX 4090 (24 GB)",),
        num_cores=16,
        ram_bytes=32 * 10**9,
        disk_free_bytes=400 * 10**9,
        locations=locations
        or Locations.from_environment({HOME_VARIABLE: "/home/ada/.local/share/allmende"}),
    )
