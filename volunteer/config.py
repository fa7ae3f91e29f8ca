"""The Config: one owner's wishes for one machine. Defaults, then the TOML file, then flags.

Runs in: every process. Pure, but for `load_config`.

It never leaves the machine, unlike a RunSpec, which is the same on every member. All problems are
reported together, each with its line and what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from volunteer.config_rules import RULES
from volunteer.errors import ConfigError
from volunteer.local_data import DEFAULT_CACHE_BYTES
from volunteer.policy.hours import parse_hours

MAX_CONFIG_BYTES = 64 * 1024
_GIB = 1024**3
GPU_CONTEXT_BYTES = 600 * 1024**2
"""What the driver takes for a process beside its tensors: 300 to 600 MB for CUDA with cuBLAS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the owner may choose."""

    device: str = "auto"
    """Where to train: `auto` (the first GPU found, else the CPU), `cpu`, `cuda`, `cuda:N`, `mps`,
    `xpu` or `xpu:N`. Default `auto`, so that a fresh install uses what there is."""
    threads: int = 0
    """CPU threads of the trainer, 0 to 1024; 0 means all cores but one. Default 0, so that the
    desktop keeps a core."""
    duty_fraction: float = 1.0
    """Part of the time in which the device works, 0.1 to 1; it rests between inner steps. Default
    1: idle time is idle; less makes it quieter and cooler."""
    compile: bool = False
    """Whether the model's layers are compiled for this machine (`torch.compile`): faster steps
    after a start that is slower by 10 to 30 s, the next ones by 2. Needs a C++ compiler, or Triton
    on a GPU; where that is missing, `allmende status` says so. Default false."""
    activation_checkpointing: str = "auto"
    """Whether layers are computed twice, which takes less memory and a third more work: `on`,
    `off`, or `auto`: where not one sequence fits otherwise. Default `auto`."""
    checkpoint_every_s: float = 60.0
    """Seconds of training between two checkpoints, 1 to 3600: the most that a crash can lose.
    Default 60, at which writing costs little on a small model."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Multiaddrs to accept peers on; port 0 picks a free one. Empty: only dial out. Default: any
    free TCP port on every IPv4 interface, so that neighbours can connect."""
    bootstrap: tuple[str, ...] = ()
    """Multiaddrs of peers to find the swarm through; each ends in `/p2p/` and the peer's id.
    Default none: there is no central server."""
    mdns: bool = True
    """Whether to look for members of the run on the local network, and to be found there. Default
    true: neighbours then find each other without being introduced."""
    dht: bool = True
    """Whether to look for members of the run, and to be found, through the peers one is connected
    to. Default true: who knows one member then finds the others."""
    upload_bytes_per_s: int = 0
    """Bytes a second that all connections together may send: 0 for no limit, or at least 65536.
    Default 0: what the line can do. The round's own exchange always goes before newcomers."""
    download_bytes_per_s: int = 0
    """Bytes a second that all connections together may receive: 0 for no limit, or at least 65536.
    Default 0: what the line can do."""
    monthly_data_budget_bytes: int = 0
    """Bytes that the network may carry for this program in a calendar month (UTC), both directions
    together: 0 for no limit, or at least 1 MB. Used up, it goes offline until the next
    month. Default 0. What TCP and below add, about 2 %, is not counted."""
    agent_memory_limit_bytes: int = 300 * 1024**2
    """Bytes of memory above which the agent starts itself anew, at most once an hour, without loss:
    0 for never, or at least 64 MiB. Default 300 MiB, three times what it needs."""
    disk_min_free_bytes: int = 2 * _GIB
    """Bytes of disk that are always left free, at least 64 MiB; below, contributing pauses.
    Default 2 GiB: a checkpoint of a small model many times over, and room for the desktop."""
    disk_max_bytes: int = 0
    """Bytes that this program's own data may take on the disk: 0 for no limit, or at least 64 MiB.
    Old shared states are dropped first; above it contributing pauses. Default 0."""
    ram_min_available_bytes: int = 512 * 1024**2
    """Bytes of memory that programs must still be able to get; below, contributing pauses. Default
    512 MiB, from which on a desktop starts to swap."""
    ram_max_bytes: int = 0
    """Bytes of memory that all processes of this program may hold together: 0 for no limit, or at
    least 512 MiB. Above it contributing pauses, and is tried again after ten minutes. Default 0."""
    gpus: tuple[str, ...] = ()
    """GPUs to use, by their own ids (`nvidia-smi -L`), which stay when cards are moved; empty: all.
    Default empty."""
    gpu_min_free_bytes: int = 1024**3
    """Bytes of GPU memory that must be free, or ours; below, contributing pauses, since it would
    push others out. Default 1 GiB."""
    gpu_max_bytes: int = 0
    """Bytes of GPU memory that the trainer may take: 0 for no limit, or at least 1 GiB. It then
    takes smaller micro-batches. Default 0: what is free, less `gpu_min_free_bytes`."""
    temperature_limit_celsius: float = 95.0
    """Degrees of the CPU, 40 to 120, at which contributing pauses, until it is 10 below. Default
    95, which laptops reach only when their cooling does not keep up."""
    gpu_temperature_limit_celsius: float = 85.0
    """Degrees of the GPU, 40 to 120; as above. Default 85, from about which on cards slow down."""
    idle_minutes: float = 5.0
    """Minutes without a key or a movement after which the machine counts as idle, 0.02 to 1440.
    Default 5: reading a page is no idleness."""
    lock_counts_as_idle: bool = True
    """Whether a locked desktop is idle after a minute. Default true: its owner has said goodbye."""
    terminals_count_as_use: bool = True
    """Whether typing in a terminal, over SSH too, is use of the machine. Default true. What is
    typed for this program does not count, nor what was typed before it was started."""
    headless: bool = False
    """Whether nobody sits at this machine: keyboard, mouse, terminals and films then do not count,
    the load of other programs does. Default false: it must be said."""
    pause_on_inhibitors: bool = True
    """Whether a program that keeps the screen on is use. Default true: a film moves no mouse."""
    pause_on_games: bool = True
    """Whether a game that tells GameMode is use. Default true."""
    exclusive_programs: tuple[str, ...] = ()
    """Names of programs beside which nothing is contributed, like `blender`. Default none."""
    others_cpu_limit: float = 0.25
    """Fraction of all CPU cores, 0.01 to 1, at which the use by other programs pauses. Default
    0.25: a desktop at rest uses less."""
    others_gpu_limit: float = 0.15
    """Fraction of the GPU's time, 0.01 to 1; as above. Default 0.15: drawing a desktop uses
    less."""
    pause_on_battery: bool = True
    """Whether a machine on battery pauses. Default true: training would empty it."""
    pause_on_metered: bool = True
    """Whether a connection that is paid by volume pauses. Default true."""
    private_data: str = ""
    """The folder of texts that `private:` means in a run's sources: an absolute path, or one that
    begins with `~/`. It is trained on here, and nothing of it leaves but what the weights have
    learned. Empty: none, and that source is left out. Default empty."""
    allow_file_sources: bool = False
    """Whether a run that somebody else has published may read the files of this machine that its
    sources name. Default false: they could be read out of the weights."""
    data_cache_max_bytes: int = DEFAULT_CACHE_BYTES
    """Bytes of disk that the tokens of a run's files may take, at least 1 MiB; what has no room is
    left out. Default 16 GiB."""
    hours: tuple[str, ...] = ()
    """When contributing is allowed, as `mon-fri 18:00-08:00`, by the machine's clock; empty:
    always. Default empty."""
    network_hours: tuple[str, ...] = ()
    """When the network may be used for it; outside, nothing is trained either, since what is
    trained must be exchanged. Default empty: always."""
    pause_after_s: float = 10.0
    """Seconds that a sensor must object before contributing pauses, 0 to 300. Default 10. A key or
    a movement on a desktop counts at once."""
    resume_after_s: float = 60.0
    """Seconds of calm before contributing goes on, 1 to 3600. Default 60."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: naming every problem.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        problems = _find_problems(values) or _find_contradictions(values)
        if problems:
            raise ConfigError("; ".join(problems.values()))

    def num_threads(self, num_cores: int) -> int:
        """Return the trainer's threads on a machine of `num_cores`: at least 1."""
        return self.threads or max(1, num_cores - 1)


def load_config(file: Path, overrides: Mapping[str, object]) -> Config:
    """Read the config.

    Args:
        file: the TOML file; it need not exist.
        overrides: values of flags by field name; None where the flag was not given.

    Raises:
        ConfigError: unreadable, not TOML, or with unknown keys or bad values; all named.
    """
    return parse_config(read_config_text(file), file, overrides)


def parse_config(text: str, file: Path, overrides: Mapping[str, object]) -> Config:
    """Return the config that `text` is, as `load_config` does; `file` is only named.

    Raises:
        ConfigError: not TOML, or with unknown keys or bad values; all named.
    """
    try:
        in_file: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}", hint="correct that line") from error
    except ValueError as error:
        raise ConfigError(
            f"{file}: a number in it has thousands of digits", hint="correct that line"
        ) from error
    except RecursionError as error:
        raise ConfigError(
            f"{file}: its values are nested too deeply", hint="correct that line"
        ) from error
    flags = {name: value for name, value in overrides.items() if value is not None}
    found = _find_problems(in_file)
    if not found and not _find_problems(flags):
        found = _find_contradictions({**in_file, **flags})
    problems = [
        f"{file}, line {_line_of(key, text)}: {problem}"
        for key, problem in found.items()
        if key not in flags or key not in RULES
    ]
    bad_flags = list(_find_problems(flags, name_of=_flag_name).values())
    if problems or bad_flags:
        hint = "a line left out means the default" if problems else "see `allmende start --help`"
        raise ConfigError("\n".join([*problems, *bad_flags]), hint=hint)
    return Config(**{key: _frozen(value) for key, value in {**in_file, **flags}.items()})


def read_config_text(file: Path) -> str:
    """Return the text of the config file; empty where there is none.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file}: larger than {MAX_CONFIG_BYTES} bytes")
        return data.decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _line_of(key: str, text: str) -> int:
    """Return the number of the line that sets `key` at the top level (TOML allows one)."""
    setting = re.compile(rf"\s*\[{{0,2}}\s*[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
    lines = text.splitlines()
    return next((n for n, line in enumerate(lines, start=1) if setting.match(line)), 1)


def _key_name(key: str) -> str:
    return f"`{key}`"


def _flag_name(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _find_problems(
    values: Mapping[str, object], *, name_of: Callable[[str], str] = _key_name
) -> dict[str, str]:
    """Return a sentence for each key of `values` that is unknown or has a bad value."""
    problems = {}
    for key, value in values.items():
        if key not in RULES:
            near = difflib.get_close_matches(key, RULES, n=1)
            guess = f"did you mean {name_of(near[0])}?" if near else f"known: {', '.join(RULES)}"
            problems[key] = f"unknown key {name_of(key)}; {guess}"
        elif problem := RULES[key](value):
            problems[key] = f"{name_of(key)} {problem}"
    return problems


def _find_contradictions(values: Mapping[str, Any]) -> dict[str, str]:
    """Return a sentence for each key that, with the others, would never let anything run.

    Args:
        values: each of them good by itself; what is absent has its default.
    """
    problems = {}
    hours, network_hours = values.get("hours", ()), values.get("network_hours", ())
    if not parse_hours(hours).overlap(parse_hours(network_hours)).spans:
        problems["network_hours"] = (
            "it could never run: `network_hours` and `hours` have no minute in common"
        )
    if values.get("gpus") and values.get("device", "auto") in ("cpu", "mps"):
        problems["gpus"] = f"`gpus` names GPUs, and `device` is {values['device']}"
    return problems


def _frozen(value: object) -> Any:  # noqa: ANN401 - checked by the rules before
    return tuple(value) if isinstance(value, list) else value
