"""What the owner alone says about data, for the trainer: a file in the run's folder.

Runs in: agent (writes), trainer (reads). The path of the private folder is on no command line and
in no message: other users of the machine could see the one, and the owner's status the other.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from volunteer.files import replace_file

FILE_NAME = "local_data.json"
SET_PRIVATE_DATA = "allmende config set private_data ~/FOLDER"
"""What gives `private:` a meaning, from the agent's next start on."""
DEFAULT_CACHE_BYTES = 16 * 1024**3


class LocalData(msgspec.Struct, frozen=True, kw_only=True):
    """One owner's wishes for one run."""

    private_dir: str = ""
    """The folder that `private:` means; empty: none, and that source is left out here."""
    cache_max_bytes: int = DEFAULT_CACHE_BYTES
    """That tokens of files may take on the disk."""


def write_local_data(run_dir: Path, local: LocalData) -> None:
    """Write the file, for the owner's eyes only.

    Raises:
        StorageFullError: the old file stands.
    """
    replace_file(run_dir / FILE_NAME, msgspec.json.encode(local))


def read_local_data(run_dir: Path) -> LocalData:
    """Return what the agent wrote; the defaults where it has written nothing of use."""
    try:
        return msgspec.json.decode((run_dir / FILE_NAME).read_bytes(), type=LocalData)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return LocalData()
