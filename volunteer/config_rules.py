"""What is wrong with a value of the Config, a rule for each kind of field.

Runs in: every process. Pure. A rule returns the end of a sentence, or nothing where all is well.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from p2p.addresses import parse_address, parse_peer_address
from p2p.errors import AddressError
from volunteer.policy.hours import parse_hours

MIN_RATE_BYTES_PER_S = 64 * 1024
"""Below it a frame of libp2p would take longer than its peers wait for it."""
OWN_PROGRAMS = ("allmende", "python", "python3")
"""Names under which this program itself runs."""
_MAX_SHOWN_BITS = 10_000
_GPU_ID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[\w:.\-]{4,64}", re.IGNORECASE)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return "a number of thousands of digits"  # Python refuses to write it down
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _device_problem(value: object) -> str:
    names = ("auto", "cpu", "cuda", "mps", "xpu")
    if isinstance(value, str) and re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d{1,3})?", value):
        return ""
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.7)
    guess = f" (did you mean `{near[0]}`?)" if near else ""
    return f"must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N{guess}, not {_shown(value)}"


def _checkpointing_problem(value: object) -> str:
    return "" if value in ("auto", "on", "off") else f"must be auto, on or off, not {_shown(value)}"


def _number_rule(least: float, most: float, *, is_whole: bool) -> Callable[[object], str]:
    kind = "a whole number" if is_whole else "a number"
    allowed: tuple[type, ...] = (int,) if is_whole else (int, float)

    def problem(value: object) -> str:
        bounds = f"{least:,} to {most:,}".replace(",", "_")
        if isinstance(value, bool) or not isinstance(value, allowed):
            return f"must be {kind}, {bounds}, not {_shown(value)}"
        assert isinstance(value, int | float)
        if not least <= value <= most:  # nor is a NaN, and an int may be too large for a float
            return f"must be {bounds}, not {_shown(value)}"
        return ""

    return problem


def _limit_rule(least: int, most: int = 2**50) -> Callable[[object], str]:
    """Return the rule for a number of bytes of which 0 means that there is no limit."""

    def problem(value: object) -> str:
        if isinstance(value, int) and not isinstance(value, bool) and value == 0:
            return ""
        if not _number_rule(least, most, is_whole=True)(value):
            return ""
        bounds = f"from {_size(least)} to {_size(most)}, or 0 for no limit"
        return f"must be a whole number of bytes {bounds}, not {_shown(value)}"

    return problem


def _size(num_bytes: int) -> str:
    """Return a bound in words: `64 MiB`, `1 MB`."""
    for power, name in ((5, "PiB"), (4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        scale = 1024**power
        if num_bytes % scale == 0:
            return f"{num_bytes // scale} {name}"
    return f"{num_bytes / 1e6:g} MB"


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


def _strings_rule(example: str, check: Callable[[str], str]) -> Callable[[object], str]:
    """Return the rule for a list of strings of which `check` says what is wrong with each."""

    def problem(value: object) -> str:
        if not isinstance(value, list | tuple):
            return f'must be a list like ["{example}"], not {_shown(value)}'
        for text in value:
            if not isinstance(text, str):
                return f'must be a list like ["{example}"]; {_shown(text)} is no text'
            if problem := check(text):
                return f'must be a list like ["{example}"]; {problem}'
        return ""

    return problem


def _hours_check(text: str) -> str:
    try:
        parse_hours([text])
    except ValueError as error:
        return str(error)
    return ""


def _program_check(text: str) -> str:
    if not text.strip() or "/" in text or "\\" in text or not _is_unicode(text):
        return f"{_shown(text)} is no name of a program"
    if text.lower().removesuffix(".exe") in OWN_PROGRAMS:
        return f"with {_shown(text)} it could never run: this program itself is called so"
    return ""


def _is_unicode(text: str) -> bool:
    """Tell whether a file of UTF-8 can hold it: of a command line's other bytes none can."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _folder_problem(value: object) -> str:
    if isinstance(value, str) and not _is_unicode(value):
        return f"must be a folder whose name is UTF-8, not {_shown(value)}"
    if isinstance(value, str) and (not value or re.match(r"/|~/|[A-Za-z]:[\\/]", value)):
        return ""
    return f"must be a folder's path that begins with / or ~/, or empty, not {_shown(value)}"


def _gpu_check(text: str) -> str:
    if _GPU_ID.fullmatch(text) is None or text.isdigit():
        return f"{_shown(text)} is no GPU's own id (`nvidia-smi -L` shows them)"
    return ""


RULES: dict[str, Callable[[object], str]] = {
    "device": _device_problem,
    "threads": _number_rule(0, 1024, is_whole=True),
    "duty_fraction": _number_rule(0.1, 1, is_whole=False),
    "compile": _bool_problem,
    "activation_checkpointing": _checkpointing_problem,
    "checkpoint_every_s": _number_rule(1, 3600, is_whole=False),
    "listen": _addresses_rule(parse_address, "/ip4/0.0.0.0/tcp/4001"),
    "bootstrap": _addresses_rule(parse_peer_address, "/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW..."),
    "mdns": _bool_problem,
    "dht": _bool_problem,
    "upload_bytes_per_s": _limit_rule(MIN_RATE_BYTES_PER_S, 2**40),
    "download_bytes_per_s": _limit_rule(MIN_RATE_BYTES_PER_S, 2**40),
    "monthly_data_budget_bytes": _limit_rule(1_000_000),
    "agent_memory_limit_bytes": _limit_rule(64 * 1024**2),
    "disk_min_free_bytes": _number_rule(64 * 1024**2, 2**50, is_whole=True),
    "disk_max_bytes": _limit_rule(64 * 1024**2),
    "ram_min_available_bytes": _number_rule(0, 2**50, is_whole=True),
    "ram_max_bytes": _limit_rule(512 * 1024**2),
    "gpus": _strings_rule("GPU-8a5c0d3e-...", _gpu_check),
    "gpu_min_free_bytes": _number_rule(0, 2**50, is_whole=True),
    "gpu_max_bytes": _limit_rule(1024**3),
    "temperature_limit_celsius": _number_rule(40, 120, is_whole=False),
    "gpu_temperature_limit_celsius": _number_rule(40, 120, is_whole=False),
    "idle_minutes": _number_rule(0.02, 1440, is_whole=False),
    "lock_counts_as_idle": _bool_problem,
    "terminals_count_as_use": _bool_problem,
    "headless": _bool_problem,
    "pause_on_inhibitors": _bool_problem,
    "pause_on_games": _bool_problem,
    "exclusive_programs": _strings_rule("blender", _program_check),
    "others_cpu_limit": _number_rule(0.01, 1, is_whole=False),
    "others_gpu_limit": _number_rule(0.01, 1, is_whole=False),
    "pause_on_battery": _bool_problem,
    "pause_on_metered": _bool_problem,
    "private_data": _folder_problem,
    "allow_file_sources": _bool_problem,
    "data_cache_max_bytes": _number_rule(2**20, 2**50, is_whole=True),
    "hours": _strings_rule("mon-fri 18:00-08:00", _hours_check),
    "network_hours": _strings_rule("sat,sun 00:00-24:00", _hours_check),
    "pause_after_s": _number_rule(0, 300, is_whole=False),
    "resume_after_s": _number_rule(1, 3600, is_whole=False),
}
"""For each field of Config, what is wrong with a value as the end of a sentence."""
