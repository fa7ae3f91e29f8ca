"""The owner's editor on the config file: what is not valid never takes its place, nor is it lost.

Runs in: the command line.

The editor works on a draft beside the file. Where the draft turns out not to be valid, it stays,
and the next edit goes on with it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from volunteer.config import Config, parse_config, read_config_text
from volunteer.config_file import DEFAULTS, toml_of
from volunteer.errors import ConfigError
from volunteer.files import replace_file, turn_in_folder

EDITORS = ("sensible-editor", "nano", "vi", "notepad")
"""Looked for where neither VISUAL nor EDITOR names one."""
_DRAFT_SUFFIX = ".draft.toml"


def draft_of(file: Path) -> Path:
    """Name the file that the editor works on."""
    return file.with_name(file.stem + _DRAFT_SUFFIX)


def edit_settings(
    file: Path, environ: Mapping[str, str], *, verify: Callable[[Config, Config], None]
) -> bool:
    """Have the owner edit the settings; return whether they are others now.

    Args:
        file: the config file; it need not exist, its folder must.
        environ: for VISUAL and EDITOR.
        verify: takes the old and the new settings; raises ConfigError where the new ones are of no
            use for another reason.

    Raises:
        ConfigError: there is no editor, or it failed; what was written is not valid, or the file
            was changed meanwhile: then the draft stays.
        StorageFullError, OSError: it could not be written; the old file stays.
    """
    before, draft_file = read_config_text(file), draft_of(file)
    if not draft_file.exists():
        replace_file(draft_file, (before or settings_template()).encode())
    elif file.exists() and file.stat().st_mtime > draft_file.stat().st_mtime:
        raise ConfigError(
            f"{file} was changed since the draft {draft_file} was left there",
            hint="take from the draft what you want, remove it, then edit again",
        )
    _run_editor(editor_argv(environ), draft_file)
    try:
        is_changed = _take_over(file, before, draft_file, verify)
    except ConfigError as error:
        raise ConfigError(
            str(error),
            hint="the settings stay as they were; `allmende config edit` goes on with your text,"
            f" which is kept in {draft_file}",
        ) from error
    draft_file.unlink()
    return is_changed


def _take_over(
    file: Path, before: str, draft_file: Path, verify: Callable[[Config, Config], None]
) -> bool:
    text = read_config_text(draft_file)
    if text == (before or settings_template()):
        return False
    config = parse_config(text, draft_file, {})
    with turn_in_folder(file.parent):
        if read_config_text(file) != before:
            raise ConfigError(f"{file} was changed by another program meanwhile")
        verify(_config_of(before, file), config)
        replace_file(file, text.encode())
    return True


def _config_of(text: str, file: Path) -> Config:
    """Return the settings that were; those of a file that was not valid are the defaults."""
    try:
        return parse_config(text, file, {})
    except ConfigError:
        return Config()


def settings_template() -> str:
    """Return what a first edit begins with: every setting with its default, commented out."""
    lines = [f"# {name} = {toml_of(value)}" for name, value in DEFAULTS.items()]
    return "\n".join(["# Settings of allmende; a line left out means the default.", *lines, ""])


def editor_argv(environ: Mapping[str, str]) -> list[str]:
    """Return the command that edits a file.

    Raises:
        ConfigError: none is named and none is here, or the name cannot be understood.
    """
    for variable in ("VISUAL", "EDITOR"):
        if wanted := environ.get(variable, "").strip():
            try:
                return shlex.split(wanted, posix=sys.platform != "win32")
            except ValueError as error:
                raise ConfigError(f"{variable}={wanted!r} is no command: {error}") from error
    for name in EDITORS:
        if found := shutil.which(name):
            return [found]
    raise ConfigError(
        "no editor is known", hint="set EDITOR to one, or use `allmende config set KEY VALUE`"
    )


def _run_editor(argv: list[str], file: Path) -> None:
    """Run it in this terminal and wait for its end."""
    try:
        ended = subprocess.run([*argv, os.fspath(file)], check=False)
    except OSError as error:
        raise ConfigError(
            f"the editor `{argv[0]}` cannot be started: {error.strerror}",
            hint="set EDITOR to another one",
        ) from error
    if ended.returncode != 0:
        raise ConfigError(
            f"the editor `{argv[0]}` ended with status {ended.returncode}",
            hint=f"the settings stay as they were; your text is kept in {file}",
        )
