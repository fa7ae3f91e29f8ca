"""Where everything lies: one answer for every process and every verb.

Runs in: every process. Pure, but for `prepare` and `verify_control_dir`.

`ALLMENDE_HOME` overrides every location, so that several volunteers can live on one machine;
otherwise the system's conventions (platformdirs) decide.

    data_dir/
      identity.key  lock  stats.sqlite  first_run.json
      signed/              per key, run and module: how far something was signed
      imports/             weights and tokenizers that runs begin from, by hash
      runs/<run_id>/
        spec.toml
        modules/<module_id>/
          records.sqlite   the signed records, and what happened to own work
          blobs/           contributions and shared states, by hash
          trainer/         the trainer's checkpoints (checkpoint/FORMAT.md)
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from platformdirs import PlatformDirs

from volunteer.errors import ConfigError
from volunteer.files import make_private_dir

HOME_VARIABLE = "ALLMENDE_HOME"
MAX_SOCKET_BYTES = 100
"""sun_path holds 104 bytes on macOS and 108 on Linux, the final zero included."""

_APP = "allmende"
_HOME_HINT = f"make it writable, or set {HOME_VARIABLE} to a folder of your own"
_RUN_ID = re.compile(r"[0-9a-f]{64}")
_MODULE_ID = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Locations:
    """Folders and files of one volunteer on this machine; all absolute."""

    data_dir: Path
    """What must not be lost: identity, runs, stats."""
    config_file: Path
    """The owner's wishes; need not exist."""
    log_dir: Path
    """Logs of the agent and its children."""
    control_socket: Path
    """Where the agent listens; gone after a restart of the machine."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Locations:
        """Find the locations.

        Args:
            environ: for ALLMENDE_HOME; without it, platformdirs also asks the process's own
                environment (XDG_DATA_HOME and its kin).
        """
        if home_text := environ.get(HOME_VARIABLE, ""):
            home = Path(os.path.abspath(os.path.expanduser(home_text)))
            return cls(
                data_dir=home,
                config_file=home / "config.toml",
                log_dir=home / "logs",
                control_socket=_short_socket(home / "run" / "control.sock"),
            )
        dirs = PlatformDirs(_APP, appauthor=False)
        return cls(
            data_dir=dirs.user_data_path,
            config_file=dirs.user_config_path / "config.toml",
            log_dir=dirs.user_log_path,
            control_socket=_short_socket(_runtime_dir(dirs) / "control.sock"),
        )

    @property
    def identity_file(self) -> Path:
        """The private key; mode 0600."""
        return self.data_dir / "identity.key"

    @property
    def signed_dir(self) -> Path:
        """What was signed with the key, in short: it must not be lost with a run's folder."""
        return self.data_dir / "signed"

    @property
    def stats_file(self) -> Path:
        """The ledger of given work."""
        return self.data_dir / "stats.sqlite"

    @property
    def first_run_file(self) -> Path:
        """Says that the first questions were answered (`volunteer.first_run`)."""
        return self.data_dir / "first_run.json"

    @property
    def imports_dir(self) -> Path:
        """What `allmende import` has read, by hash (a BlobStore): RunSpecs name it."""
        return self.data_dir / "imports"

    @property
    def runs_dir(self) -> Path:
        """One folder a run."""
        return self.data_dir / "runs"

    def run_dir(self, run_id: str) -> Path:
        """Return the folder of a run.

        Raises:
            ValueError: `run_id` is not one, and could name a folder elsewhere.
        """
        return self.runs_dir / _checked(run_id, _RUN_ID, "run id")

    def run_spec_file(self, run_id: str) -> Path:
        """Return the run's RunSpec file."""
        return self.run_dir(run_id) / "spec.toml"

    def module_dir(self, run_id: str, module_id: str) -> Path:
        """Return the folder of a run's module; ValueError as for `run_dir`."""
        return self.run_dir(run_id) / "modules" / _checked(module_id, _MODULE_ID, "module id")

    def record_file(self, run_id: str, module_id: str) -> Path:
        """Return the database of signed records (`agent.record_log`)."""
        return self.module_dir(run_id, module_id) / "records.sqlite"

    def blobs_dir(self, run_id: str, module_id: str) -> Path:
        """Return the folder of the module's blobs."""
        return self.module_dir(run_id, module_id) / "blobs"

    def trainer_dir(self, run_id: str, module_id: str) -> Path:
        """Return the folder of the trainer's checkpoints."""
        return self.module_dir(run_id, module_id) / "trainer"

    def prepare(self) -> None:
        """Create the folders that every agent needs, mode 0700.

        Raises:
            ConfigError: a folder cannot be made or written to, or the control socket's is not the
                owner's alone.
        """
        _make_dir(self.config_file.parent)
        for folder in (self.runs_dir, self.log_dir, self.control_socket.parent, self.data_dir):
            _make_dir(folder)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise ConfigError(f"{folder} cannot be written to", hint=_HOME_HINT)
        self.verify_control_dir()

    def verify_control_dir(self) -> None:
        """Check that nobody else can put a socket where the agent's should be.

        The short fallback lies in a folder that every user of the machine can write to, so agent
        and clients both check. A folder that does not exist is fine: no agent runs.

        Raises:
            ConfigError: it is a link, another user's, or open to others.
        """
        folder = self.control_socket.parent
        try:
            status = os.lstat(folder)
        except FileNotFoundError:
            return
        is_safe = stat.S_ISDIR(status.st_mode)
        if hasattr(os, "getuid"):
            is_safe = is_safe and status.st_uid == os.getuid() and not status.st_mode & 0o022
        if not is_safe:
            raise ConfigError(
                f"{folder} is not a folder that only you can write to",
                hint=f"`chmod 700` it if it is yours; else set {HOME_VARIABLE} to a short path",
            )


def _make_dir(folder: Path) -> None:
    try:
        make_private_dir(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}", hint=_HOME_HINT) from error


def _checked(name: str, pattern: re.Pattern[str], kind: str) -> str:
    if not pattern.fullmatch(name):
        raise ValueError(f"{name!r} is not a {kind}")
    return name


def _runtime_dir(dirs: PlatformDirs) -> Path:
    with warnings.catch_warnings():
        # Without a login session there is no runtime folder; the fallback is a checked one.
        warnings.simplefilter("ignore")
        try:
            return dirs.user_runtime_path
        except PermissionError as error:
            hint = f"remove it, or set {HOME_VARIABLE} to a folder of your own"
            raise ConfigError(
                f"no safe place for the control socket: {error}", hint=hint
            ) from error


def _short_socket(socket_file: Path) -> Path:
    """Return `socket_file`, or a stable stand-in where its name is too long for a socket."""
    if len(os.fsencode(socket_file)) <= MAX_SOCKET_BYTES:
        return socket_file
    name = hashlib.blake2b(os.fsencode(socket_file), digest_size=8).hexdigest() + ".sock"
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    short = Path(tempfile.gettempdir()) / f"{_APP}-{user}" / name
    # A temporary folder with a long name of its own is no help.
    is_short = len(os.fsencode(short)) <= MAX_SOCKET_BYTES
    return short if is_short else Path("/tmp") / short.relative_to(tempfile.gettempdir())  # noqa: S108
