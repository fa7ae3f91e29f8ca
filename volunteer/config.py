"""The Config: one owner's wishes for one machine. Defaults, then the TOML file, then flags.

Runs in: every process. Pure, but for `load_config`.

It never leaves the machine, unlike a RunSpec, which is the same on every member. All problems are
reported together, each with its line and what to write instead.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2p.addresses import parse_address, parse_peer_address
from p2p.errors import AddressError
from volunteer.errors import ConfigError

MAX_CONFIG_BYTES = 64 * 1024
MIN_RATE_BYTES_PER_S = 64 * 1024
"""Below it a frame of libp2p would take longer than its peers wait for it."""
_GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the owner may choose."""

    device: str = "auto"
    """Where to train: `auto` (the first GPU found, else the CPU), `cpu`, `cuda`, `cuda:N`, `mps`,
    `xpu` or `xpu:N`. Default `auto`, so that a fresh install uses what there is."""
    threads: int = 0
    """CPU threads of the trainer, 0 to 1024; 0 means all cores but one. Default 0, so that the
    desktop keeps a core."""
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
    disk_min_free_bytes: int = 2 * _GIB
    """Bytes of disk that are always left free, at least 64 MiB; below, contributing pauses.
    Default 2 GiB: a checkpoint of a small model many times over, and room for the desktop."""
    pause_on_battery: bool = True
    """Whether a machine on battery pauses. Default true: training would empty it."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigError: naming every problem.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if problems := _find_problems(values):
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
    text = _read_text(file)
    try:
        in_file: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not TOML: {error}", hint="correct that line") from error
    flags = {name: value for name, value in overrides.items() if value is not None}
    problems = [
        f"{file}, line {_line_of(key, text)}: {problem}"
        for key, problem in _find_problems(in_file).items()
        if key not in flags or key not in _RULES
    ]
    bad_flags = list(_find_problems(flags, name_of=_flag_name).values())
    if problems or bad_flags:
        hint = "a line left out means the default" if problems else "see `allmende start --help`"
        raise ConfigError("\n".join([*problems, *bad_flags]), hint=hint)
    return Config(**{key: _frozen(value) for key, value in {**in_file, **flags}.items()})


def _read_text(file: Path) -> str:
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
        if key not in _RULES:
            near = difflib.get_close_matches(key, _RULES, n=1)
            guess = f"did you mean {name_of(near[0])}?" if near else f"known: {', '.join(_RULES)}"
            problems[key] = f"unknown key {name_of(key)}; {guess}"
        elif problem := _RULES[key](value):
            problems[key] = f"{name_of(key)} {problem}"
    return problems


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _frozen(value: object) -> Any:  # noqa: ANN401 - checked by the rules before
    return tuple(value) if isinstance(value, list) else value


def _device_problem(value: object) -> str:
    names = ("auto", "cpu", "cuda", "mps", "xpu")
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?", value):
        return ""
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.7)
    guess = f" (did you mean `{near[0]}`?)" if near else ""
    return f"must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N{guess}, not {_shown(value)}"


def _number_rule(least: float, most: float, *, is_whole: bool) -> Callable[[object], str]:
    kind = "a whole number" if is_whole else "a number"
    allowed: tuple[type, ...] = (int,) if is_whole else (int, float)

    def problem(value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, allowed):
            return f"must be {kind}, not {_shown(value)}"
        assert isinstance(value, int | float)
        if not math.isfinite(value) or not least <= value <= most:
            bounds = f"{least:,} to {most:,}".replace(",", "_")
            return f"must be {bounds}, not {_shown(value)}"
        return ""

    return problem


def _rate_problem(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value == 0:
        return ""
    problem = _number_rule(MIN_RATE_BYTES_PER_S, 2**40, is_whole=True)(value)
    return f"{problem} (0: no limit)" if problem else ""


def _bool_problem(value: object) -> str:
    return "" if isinstance(value, bool) else f"must be true or false, not {_shown(value)}"


def _addresses_rule(parse: Callable[[str], object], example: str) -> Callable[[object], str]:
    """Return the rule for a list whose entries `parse` accepts, or raises AddressError."""

    def problem(value: object) -> str:
        if not isinstance(value, list | tuple):
            return f'must be a list of addresses like ["{example}"], not {_shown(value)}'
        for addr in value:
            if not isinstance(addr, str):
                return f"must be addresses like {example}, not {_shown(addr)}"
            try:
                parse(addr)
            except AddressError as error:
                return f"must be addresses like {example}; {error}"
        return ""

    return problem


_RULES: dict[str, Callable[[object], str]] = {
    "device": _device_problem,
    "threads": _number_rule(0, 1024, is_whole=True),
    "checkpoint_every_s": _number_rule(1, 3600, is_whole=False),
    "listen": _addresses_rule(parse_address, "/ip4/0.0.0.0/tcp/4001"),
    "bootstrap": _addresses_rule(parse_peer_address, "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW..."),
    "mdns": _bool_problem,
    "dht": _bool_problem,
    "upload_bytes_per_s": _rate_problem,
    "download_bytes_per_s": _rate_problem,
    "disk_min_free_bytes": _number_rule(64 * 1024**2, 2**50, is_whole=True),
    "pause_on_battery": _bool_problem,
}
"""For each field, what is wrong with a value as the end of a sentence; empty if nothing is."""
