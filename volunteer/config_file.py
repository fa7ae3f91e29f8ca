"""Changes of single settings in the config file, which is the owner's: the rest of it stays.

Runs in: the command line. The text functions are pure.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from volunteer.config import Config, load_config, parse_config, read_config_text
from volunteer.config_rules import RULES
from volunteer.errors import ConfigError
from volunteer.files import replace_file, turn_in_folder

_UNCHANGED = "the settings stay as they were"
_SCALES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SCALES |= {f"{scale}i": 2 ** (10 * power) for power, scale in enumerate("kmgt", start=1)}
_AMOUNT = re.compile(
    r"(?P<number>\d{1,6}(\.\d{1,6})?) ?(?P<scale>[kmgt]i?)b?(/s)?", re.IGNORECASE | re.ASCII
)
"""Bytes as people write them: 20GB, 1.5 GiB, 500k, 2MB/s."""
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")
DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)}
FIXED_KEYS = frozenset(
    {
        *("device", "threads", "checkpoint_every_s", "listen", "bootstrap", "mdns", "dht"),
        *(
            "agent_memory_limit_bytes",
            "upload_bytes_per_s",
            "download_bytes_per_s",
            "gpus",
            "gpu_max_bytes",
            "duty_fraction",
            "compile",
            "activation_checkpointing",
            "private_data",
            "allow_file_sources",
            "data_cache_max_bytes",
        ),
    }
)
"""What an agent that runs takes note of at its next start only."""


def change_setting(
    file: Path,
    key: str,
    values: Sequence[str] | None,
    *,
    verify: Callable[[Config], None] | None = None,
) -> Config:
    """Set `key` in the config file, or take it out; the file is replaced only if it is then valid.

    Args:
        file: the config file; it need not exist, its folder must.
        key: a field of Config.
        values: as typed, one for a plain setting, any number for a list; None: the default again.
        verify: raises ConfigError where the new settings are of no use for another reason.

    Returns:
        The config that now holds.

    Raises:
        ConfigError: unknown key, bad value, or the rest of the file is not valid; or as `verify`.
        StorageFullError, OSError: it could not be written; the old file stays.
    """
    verify_key(key)
    value = DEFAULTS[key] if values is None else parse_value(key, values)
    if problem := RULES[key](value):
        raise ConfigError(f"`{key}` {problem}", hint=_UNCHANGED)
    file = file.resolve()  # a link stays one
    with turn_in_folder(file.parent):
        before = read_config_text(file)
        # As a flag: lines are those of the file that is there, and the new value has none yet.
        config = parse_config(before, file, {key: value})
        if verify is not None:
            verify(config)
        text = without_key(before, key)
        if values is not None:
            text = with_line(text, f"{key} = {toml_of(value)}")
        parse_config(text, file, {})
        replace_file(file, text.encode())
    return config


def read_setting(file: Path, key: str) -> object:
    """Return the value that holds.

    Raises:
        ConfigError: unknown key, or the file is not valid.
    """
    verify_key(key)
    value: object = getattr(load_config(file, {}), key)
    return value


def verify_key(key: str) -> None:
    """Raise ConfigError, with the nearest known one, if there is no setting of that name."""
    if key in DEFAULTS:
        return
    near = difflib.get_close_matches(key, DEFAULTS, n=1)
    guess = f"did you mean `{near[0]}`?" if near else "`allmende config get` lists them"
    raise ConfigError(f"there is no setting `{key}`", hint=guess)


def parse_value(key: str, values: Sequence[str]) -> object:
    """Return what was typed as a value of the setting's type.

    Raises:
        ConfigError: it is none; whether it may be so is checked later.
    """
    default = DEFAULTS[key]
    if isinstance(default, tuple):
        return [value for value in values if value]
    if len(values) != 1:
        raise ConfigError(f"`{key}` takes one value, not {len(values)}")
    text = values[0].strip()
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text.lower() not in (*_YES, *_NO):
            raise ConfigError(f"`{key}` {RULES[key](text)}", hint=_UNCHANGED)
        return text.lower() in _YES
    amount = _AMOUNT.fullmatch(text) if "_bytes" in key else None
    if amount is not None:
        return round(float(amount["number"]) * _SCALES[amount["scale"].lower()])
    try:
        return float(text) if isinstance(default, float) else int(text)
    except ValueError as error:
        raise ConfigError(f"`{key}` {RULES[key](text)}", hint=_UNCHANGED) from error


def toml_of(value: object) -> str:
    """Return a setting's value as TOML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml_of(each) for each in value)}]"
    if isinstance(value, str):
        # JSON's strings are TOML's, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value)


def with_line(text: str, line: str) -> str:
    """Return `text` with a top-level setting added: before the first table, if there is one."""
    lines = text.splitlines(keepends=True)
    tables = [n for n, each in enumerate(lines) if each.lstrip().startswith("[")]
    place = tables[0] if tables else len(lines)
    if place and not lines[place - 1].endswith("\n"):
        lines[place - 1] += "\n"
    return "".join([*lines[:place], line + "\n", *lines[place:]])


def without_key(text: str, key: str) -> str:
    """Return `text` without the setting `key`, however many lines it takes.

    Raises:
        ConfigError: the text is not TOML.
    """
    try:
        if key not in tomllib.loads(text):
            return text
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"the settings are not TOML: {error}", hint="correct that line"
        ) from error
    lines = text.splitlines(keepends=True)
    setting = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
    first = next((n for n, line in enumerate(lines) if setting.match(line)), None)
    if first is None:
        raise ConfigError(f"`{key}` is set in a way that only you can change: by hand")
    for end in range(first + 1, len(lines) + 1):
        if _is_whole("".join(lines[first:end])):
            return "".join([*lines[:first], *lines[end:]])
    raise ConfigError(f"`{key}` is set in a way that only you can change: by hand")


def _is_whole(text: str) -> bool:
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return False
    return True
