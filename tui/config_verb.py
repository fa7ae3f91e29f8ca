"""`allmende config`: read and change settings.

Runs in: the command line. It changes the file; an agent that runs looks at the file by itself.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tui.arguments import AsJson
from tui.wording import format_bytes
from volunteer.locations import Locations
from volunteer.printable import printable

if TYPE_CHECKING:
    from volunteer.config import Config
    from volunteer.errors import VolunteerError
    from volunteer.run import RunSpec

LIMIT_KEYS = frozenset({"disk_max_bytes", "ram_max_bytes", "gpu_max_bytes"})
"""What a run may need more of than the owner allows."""
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
    as_json: AsJson = False,
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
        notes = [] if value == DEFAULTS[name] else ["yours"]
        if "_bytes" in name and value:
            notes.append(format_bytes(value) + ("/s" if name.endswith("_per_s") else ""))
        _write(f"{name} = {toml_of(value)}{'  # ' + ', '.join(notes) if notes else ''}")


# A number may be negative, if only to be refused for what it is.
@config_app.command("set", context_settings={"ignore_unknown_options": True})
def set_setting(
    key: Key,
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="VALUE...",
            help="The value, bytes also as 20GB; for a list, each of its entries.",
        ),
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


@config_app.command("edit")
def edit_file() -> None:
    """Open the settings in your editor (VISUAL, EDITOR); they change if they are valid after it."""
    from volunteer.config_edit import edit_settings
    from volunteer.errors import ConfigError

    file = _locations().config_file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        is_changed = edit_settings(
            file, os.environ, verify=_verify_limits_if_changed, asks_again=_asks_again
        )
    except OSError as error:
        raise ConfigError(f"{file} could not be written: {error.strerror}") from error
    _write(f"{'Changed' if is_changed else 'Nothing has changed'}: {file}")


def _asks_again(error: VolunteerError) -> bool:
    """Tell what is wrong and ask, where there is somebody to answer."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(printable(f"allmende: {error}") + "\n")
    try:
        return typer.confirm("Edit again?", default=True, err=True)
    except typer.Abort:
        return False


def _verify_limits_if_changed(before: Config, after: Config) -> None:
    if any(getattr(before, key) != getattr(after, key) for key in LIMIT_KEYS):
        _verify_run_can_live(after)


def _change(key: str, values: list[str] | None) -> None:
    from volunteer.config_file import FIXED_KEYS, change_setting, toml_of
    from volunteer.errors import ConfigError

    file = _locations().config_file
    verify = _verify_run_can_live if key in LIMIT_KEYS else None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        config = change_setting(file, key, values, verify=verify)
    except OSError as error:
        raise ConfigError(f"{file} could not be written: {error.strerror}") from error
    when = "from the agent's next start on" if key in FIXED_KEYS else "from now on"
    _write(f"{key} = {toml_of(getattr(config, key))}   ({when}; {file})")


def _verify_run_can_live(config: Config) -> None:
    """Refuse limits at once with which the agent would not start.

    Raises:
        ConfigError: naming what is too little, what is needed, and what is used now.
    """
    from volunteer.policy.sensors.disk import read_tree_bytes
    from volunteer.run_limits import verify_limits

    used_bytes = read_tree_bytes(_locations().data_dir)
    verify_limits(_present_run(), config, used_bytes=used_bytes)


def _present_run() -> RunSpec:
    """Return the run of the agent that runs; without one, what a start without flags takes."""
    from tui.launch import find_agent
    from volunteer.data.builtin import DEFAULT_RUN, load_builtin_run
    from volunteer.errors import ControlError
    from volunteer.run import read_run_spec

    try:
        status = find_agent(_locations())
    except ControlError:  # it runs and does not answer: the usual run stands in for its
        status = None
    if status is None:
        return load_builtin_run(DEFAULT_RUN)
    return read_run_spec(_locations().run_spec_file(status.run_id))


def _locations() -> Locations:
    return Locations.from_environment(os.environ)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
