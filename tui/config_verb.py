"""`allmende config`: read and change settings.

Runs in: the command line. It changes the file; an agent that runs looks at the file by itself.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import msgspec
import typer

from volunteer.locations import Locations

config_app = typer.Typer(
    help="Read and change settings; `config get` lists them all.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Key = Annotated[str, typer.Argument(metavar="KEY", help="A setting, as `idle_minutes`.")]


@config_app.command("get")
def get_setting(
    key: Annotated[
        str | None, typer.Argument(metavar="[KEY]", help="A setting; without: all of them.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False,
) -> None:
    """Print a setting, or all, as they hold: from the file, or the default."""
    from volunteer.config import load_config
    from volunteer.config_file import DEFAULTS, read_setting, toml_of

    file = _locations().config_file
    if key is not None:
        value = read_setting(file, key)
        _write(msgspec.json.encode(value).decode() if as_json else toml_of(value))
        return
    config = load_config(file, {})
    values = {name: getattr(config, name) for name in DEFAULTS}
    if as_json:
        _write(msgspec.json.encode(values).decode())
        return
    for name, value in values.items():
        is_default = value == DEFAULTS[name]
        _write(f"{name} = {toml_of(value)}{'' if is_default else '  # yours'}")


@config_app.command("set")
def set_setting(
    key: Key,
    values: Annotated[
        list[str],
        typer.Argument(metavar="VALUE...", help="The value; for a list, each of its entries."),
    ],
) -> None:
    """Change a setting. What can never work is refused, and the file stays as it was."""
    _change(key, values)


@config_app.command("unset")
def unset_setting(key: Key) -> None:
    """Take a setting out of the file, so that its default holds again."""
    _change(key, None)


@config_app.command("path")
def print_path() -> None:
    """Print where the settings are; the file need not exist."""
    _write(str(_locations().config_file))


def _change(key: str, values: list[str] | None) -> None:
    from volunteer.config_file import FIXED_KEYS, change_setting, toml_of
    from volunteer.errors import ConfigError

    file = _locations().config_file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        config = change_setting(file, key, values)
    except OSError as error:
        raise ConfigError(f"{file} could not be written: {error.strerror}") from error
    when = "from the agent's next start on" if key in FIXED_KEYS else "from now on"
    _write(f"{key} = {toml_of(getattr(config, key))}   ({when}; {file})")


def _locations() -> Locations:
    return Locations.from_environment(os.environ)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
