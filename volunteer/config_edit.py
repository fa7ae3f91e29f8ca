"""The owner's editor on the config file: what is not valid never takes its place, nor is it lost.

Runs in: the command line.

The editor works on a draft of its own beside the file. Where that cannot take the file's place, it
stays, and the owner is told where.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from volunteer.config import Config, parse_config, read_config_text
from volunteer.config_file import DEFAULTS, toml_of
from volunteer.errors import ConfigError, StorageFullError, VolunteerError
from volunteer.files import replace_file, turn_in_folder

EDITORS = ("sensible-editor", "nano", "vi", "notepad")
"""Looked for where neither VISUAL nor EDITOR names one."""


def edit_settings(
    file: Path,
    environ: Mapping[str, str],
    *,
    verify: Callable[[Config, Config], None],
    asks_again: Callable[[VolunteerError], bool] = lambda error: False,
) -> bool:
    """Have the owner edit the settings; return whether they are others now.

    Args:
        file: the config file; it need not exist, its folder must.
        environ: for VISUAL and EDITOR.
        verify: takes the old and the new settings; raises ConfigError where the new ones are of no
            use for another reason.
        asks_again: takes why the text cannot be used; returns whether to open the editor again.

    Raises:
        ConfigError: there is no editor, or it failed; what was written is not valid, or the file
            was changed meanwhile: then the draft stays, and is named.
        StorageFullError, OSError: it could not be written; the old file stays.
    """
    file = file.resolve()  # a link stays one
    argv = editor_argv(environ)
    before = read_config_text(file)
    begun_with = before or settings_template()
    draft_file = file.with_name(f"{file.stem}.draft-{secrets.token_hex(4)}.toml")
    replace_file(draft_file, begun_with.encode())
    while True:
        try:
            _run_editor(argv, draft_file)
            text = _read_draft(draft_file)
            if text == begun_with:
                draft_file.unlink()
                return False
            _take_over(file, before, text, draft_file, verify)
        except (ConfigError, StorageFullError) as error:
            if draft_file.exists() and asks_again(error):
                continue
            raise _told_where(error, draft_file, begun_with) from error
        draft_file.unlink(missing_ok=True)
        return True


def _told_where(error: VolunteerError, draft_file: Path, begun_with: str) -> VolunteerError:
    """Return the error with where the owner's text is, if there is one."""
    hint = "the settings stay as they were"
    with contextlib.suppress(ConfigError):
        if _read_draft(draft_file) == begun_with:
            draft_file.unlink()
    if draft_file.exists():
        hint += f"; your text is kept in {draft_file}"
    return type(error)(str(error), hint=hint)


def _read_draft(draft_file: Path) -> str:
    if not draft_file.exists():  # which is no wish for an empty file
        raise ConfigError(f"{draft_file} is gone")
    return read_config_text(draft_file)


def _take_over(
    file: Path,
    before: str,
    text: str,
    draft_file: Path,
    verify: Callable[[Config, Config], None],
) -> None:
    config = parse_config(text, draft_file, {})
    with turn_in_folder(file.parent):
        if read_config_text(file) != before:
            raise ConfigError(f"{file} was changed by another program meanwhile")
        verify(_config_of(before, file), config)
        replace_file(file, text.encode())


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
        with _leaving_interrupts_to_the_editor():
            ended = subprocess.run([*argv, os.fspath(file)], check=False)
    except OSError as error:
        raise ConfigError(f"the editor `{argv[0]}` cannot be started: {error.strerror}") from error
    if ended.returncode != 0:
        raise ConfigError(f"the editor `{argv[0]}` ended with status {ended.returncode}")


@contextlib.contextmanager
def _leaving_interrupts_to_the_editor() -> Iterator[None]:
    """Take no notice of Ctrl+C: editors have a use for it, and it reaches both."""
    # A handler, and not SIG_IGN, which the editor would inherit.
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
