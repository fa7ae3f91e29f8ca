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

from volunteer.errors import ConfigError

MAX_CONFIG_BYTES = 64 * 1024
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
    problems += [
        f"--{key.replace('_', '-')}: {problem}" for key, problem in _find_problems(flags).items()
    ]
    if problems:
        raise ConfigError("\n".join(problems), hint="a line left out means the default")
    return Config(**{key: _frozen(value) for key, value in {**in_file, **flags}.items()})


def _read_text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            raise ConfigError(f"{file}: larger than {MAX_CONFIG_BYTES} bytes")
        return data.decode("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error


def _line_of(key: str, text: str) -> int:
    """Return the number of the line that sets `key` at the top level (TOML allows one)."""
    setting = re.compile(rf"\s*\[{{0,2}}\s*[\"']?{re.escape(key)}[\"']?\s*[=.\]]")
    lines = text.splitlines()
    return next((n for n, line in enumerate(lines, start=1) if setting.match(line)), 1)


def _find_problems(values: Mapping[str, object]) -> dict[str, str]:
    """Return a sentence for each key of `values` that is unknown or has a bad value."""
    problems = {}
    for key, value in values.items():
        if key not in _RULES:
            near = difflib.get_close_matches(key, _RULES, n=1)
            guess = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(_RULES)}"
            problems[key] = f"unknown key `{key}`; {guess}"
        elif problem := _RULES[key](value):
            problems[key] = f"`{key}` {problem}, not {_shown(value)}"
    return problems


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(list(value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _frozen(value: object) -> Any:  # noqa: ANN401 - checked by the rules before
    return tuple(value) if isinstance(value, list) else value


def _device_problem(value: object) -> str:
    names = ("auto", "cpu", "cuda", "mps", "xpu")
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?", value):
        return ""
    near = difflib.get_close_matches(str(value), names, n=1)
    return "must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N" + (
        f" (did you mean `{near[0]}`?)" if near else ""
    )


def _number_rule(least: float, most: float, *, is_whole: bool) -> Callable[[object], str]:
    kind = "a whole number" if is_whole else "a number"
    allowed: tuple[type, ...] = (int,) if is_whole else (int, float)

    def problem(value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, allowed):
            return f"must be {kind}"
        assert isinstance(value, int | float)
        if not math.isfinite(value) or not least <= value <= most:
            return f"must be {least:,} to {most:,}".replace(",", "_")
        return ""

    return problem


def _bool_problem(value: object) -> str:
    return "" if isinstance(value, bool) else "must be true or false"


def _multiaddrs_rule(*, needs_peer_id: bool) -> Callable[[object], str]:
    """Only the outline: p2p knows the rest, but has no line numbers."""
    pattern = r"/(ip4|ip6|dns|dns4|dns6|dnsaddr)/[^/\s]+(/[^/\s]+)*"
    example = "/ip4/192.0.2.1/tcp/4001"
    if needs_peer_id:
        pattern += r"/p2p/[A-Za-z0-9]+"
        example += "/p2p/12D3KooW..."

    def problem(value: object) -> str:
        is_fine = isinstance(value, list | tuple) and all(
            isinstance(addr, str) and re.fullmatch(pattern, addr) for addr in value
        )
        return "" if is_fine else f'must be a list of multiaddrs like ["{example}"]'

    return problem


_RULES: dict[str, Callable[[object], str]] = {
    "device": _device_problem,
    "threads": _number_rule(0, 1024, is_whole=True),
    "checkpoint_every_s": _number_rule(1, 3600, is_whole=False),
    "listen": _multiaddrs_rule(needs_peer_id=False),
    "bootstrap": _multiaddrs_rule(needs_peer_id=True),
    "disk_min_free_bytes": _number_rule(64 * 1024**2, 2**50, is_whole=True),
    "pause_on_battery": _bool_problem,
}
"""For each field, what is wrong with a value as the end of a sentence; empty if nothing is."""
