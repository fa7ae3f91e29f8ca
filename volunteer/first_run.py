"""What the owner is told, and asked, before anything runs for the first time.

Runs in: the command line, tui. Nothing runs before these questions are answered, but for an
explicit `allmende start`. That they were is a file beside the key; what was answered is in the
settings, where `allmende config` changes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec
import psutil

from volunteer.config import Config, load_config
from volunteer.config_file import change_setting
from volunteer.data.builtin import DEFAULT_RUN, load_builtin_run
from volunteer.doctor.check import LookError, within
from volunteer.doctor.nvidia import read_nvidia
from volunteer.errors import ConfigError, StorageFullError
from volunteer.files import replace_file
from volunteer.locations import Locations
from volunteer.policy.sensors.disk import read_free_bytes
from volunteer.run import RunSpec
from volunteer.training.layout import num_parameters

When = Literal["idle", "always"]
_GB = 1e9


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """The file that says that the questions were answered."""

    format: int = 1
    answered_utc: str


def has_answered(locations: Locations) -> bool:
    """Tell whether the owner has answered; a file that cannot be read is asked for again."""
    try:
        msgspec.json.decode(locations.first_run_file.read_bytes(), type=Answered)
    except (OSError, ValueError):
        return False
    return True


def keep_answers(locations: Locations, when: When | None) -> Config:
    """Keep that the owner has answered, and what; what was set by hand stays, but for the answer.

    Args:
        locations: where; the folders are made.
        when: `always`: nobody sits at this machine (`headless`); `idle`: somebody may; None: as the
            settings have it.

    Returns:
        The settings that hold now.

    Raises:
        ConfigError: the settings are not valid, or a file cannot be written.
    """
    locations.prepare()
    config = load_config(locations.config_file, {})
    try:
        if when is not None and config.headless != (when == "always"):
            wanted = ["true"] if when == "always" else None
            config = change_setting(locations.config_file, "headless", wanted)
        now_utc = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if not has_answered(locations):
            data = msgspec.json.encode(Answered(answered_utc=now_utc))
            replace_file(locations.first_run_file, data)
    except (OSError, StorageFullError) as error:
        hint = "free some space, or make the folder writable"
        raise ConfigError(f"the answer could not be kept: {error}", hint=hint) from error
    return config


def when_of(config: Config) -> When:
    """Return what the settings say now."""
    return "always" if config.headless else "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the program would use here."""

    config: Config
    spec: RunSpec
    gpus: tuple[str, ...]
    """NVIDIA GPUs, with their memory; empty: none, or none that the driver tells of."""
    num_cores: int
    ram_bytes: int
    disk_free_bytes: int | None
    """Where the data would lie; None: cannot tell."""
    locations: Locations


def make_plan(locations: Locations, read_gpus: Callable[[], tuple[str, ...]] | None = None) -> Plan:
    """Look at this machine; takes up to some seconds where a driver hangs.

    Raises:
        ConfigError: the settings are not valid.
    """
    return Plan(
        config=load_config(locations.config_file, {}),
        spec=load_builtin_run(DEFAULT_RUN),
        gpus=(read_gpus or _gpus)(),
        num_cores=os.cpu_count() or 1,
        ram_bytes=psutil.virtual_memory().total,
        disk_free_bytes=read_free_bytes(locations.data_dir),
        locations=locations,
    )


def _gpus() -> tuple[str, ...]:
    try:
        facts = within(read_nvidia)
    except LookError:
        return ()
    return tuple(f"{gpu.name} ({gpu.total_bytes / _GB:.0f} GB)" for gpu in facts.gpus)


def plan_rows(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Return (label, sentence) of everything that is used, sent and stored."""
    return (
        ("Trains", _training(plan)),
        ("Memory", _memory(plan)),
        ("Disk", _disk(plan)),
        ("Network", _network(plan)),
        (
            "Sends",
            "compressed changes of the model's weights, and small signed records, to the run's"
            " peers, who see your IP address. No file, no text, no name of yours.",
        ),
        ("Stores", f"key, statistics, checkpoints, logs, for you alone: {plan.locations.data_dir}"),
    )


def _training(plan: Plan) -> str:
    config, spec = plan.config, plan.spec
    num_threads = config.num_threads(plan.num_cores)
    cpu = f"{num_threads} of {plan.num_cores} CPU threads at lowest priority"
    what = f"a model of {num_parameters(spec.model) / 1e6:.1f} M parameters (run {spec.name})"
    if config.device == "cpu":
        return f"{what}, on {cpu}"
    if config.device != "auto":
        return f"{what}, on {config.device} and {cpu}"
    if plan.gpus:
        return f"{what}, on {', '.join(plan.gpus)} and {cpu}"
    return f"{what}, on the first GPU that PyTorch can use, else {cpu}"


def _memory(plan: Plan) -> str:
    needed, least = plan.spec.hardware.ram_bytes, plan.config.ram_min_available_bytes
    most = plan.config.ram_max_bytes
    own = f"above {most / _GB:.1f} GB, and " if most else ""
    return (
        f"about {needed / _GB:.1f} of {plan.ram_bytes / _GB:.0f} GB; pauses {own}when others have"
        f" less than {least / _GB:.1f} GB"
    )


def _disk(plan: Plan) -> str:
    needed, least = plan.spec.hardware.disk_bytes, plan.config.disk_min_free_bytes
    free = plan.disk_free_bytes
    here = "" if free is None else f" of {free / _GB:.0f} GB free"
    most = plan.config.disk_max_bytes
    own = f", and above {most / _GB:.1f} GB of its own" if most else ""
    return f"about {needed / _GB:.1f}{here or ' GB'}; pauses below {least / _GB:.1f} GB{own}"


def _network(plan: Plan) -> str:
    spec, config = plan.spec, plan.config
    blob_bytes = spec.codec.bytes_per_parameter * num_parameters(spec.model)
    most = spec.rounds.max_contributions
    caps = [
        f"{name} at most {cap / 1e6:.2f} MB/s"
        for name, cap in (("up", config.upload_bytes_per_s), ("down", config.download_bytes_per_s))
        if cap
    ]
    if config.monthly_data_budget_bytes:
        caps.append(f"at most {config.monthly_data_budget_bytes / _GB:.2f} GB a month")
    return (
        f"every {spec.rounds.round_s / 60:g} min {blob_bytes / 1e6:.1f} MB for each of up to {most}"
        f" members; {', '.join(caps) or 'unlimited'}"
    )


def when_sentences() -> dict[When, str]:
    """Return what each answer means."""
    return {
        "idle": "Only while nobody uses this machine: no key, film or game, no other program that"
        " needs the CPU or GPU, not on battery.",
        "always": "Always: nobody sits here (a server). Other programs come first.",
    }
