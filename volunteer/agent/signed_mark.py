"""Remembers, beside the key, how far something was signed with it: what is lost is not re-signed.

Runs in: agent. What a member signs twice differently is proof of lying (ROUNDS.md rules 24 and 26).
The records say what was signed, but they lie in the run's folder, which an owner may delete, or put
back from an old copy, while the key stays. So the height up to which something was signed in a
run's module is a small file in the key's folder, on the disk before what is signed may be sent.
Who has a mark and no such record has lost it, and listens before it signs (rounds/silence.py).

The key's name is in the file's: with another key nothing was signed. A key that was imported
(`allmende identity import`) may have signed anything elsewhere, in every run that has no mark yet.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import msgspec

from volunteer.files import make_private_dir, replace_file
from volunteer.own_identity import imported_mark

log = logging.getLogger(__name__)
MAX_FILE_BYTES = 1024


class _Mark(msgspec.Struct, frozen=True, kw_only=True):
    height: Annotated[int, msgspec.Meta(ge=0)]
    """The greatest of the records signed."""


_decoder = msgspec.json.Decoder(_Mark)


class SignedMark:
    """The mark of one key in one run's module."""

    def __init__(self, folder: Path, peer_id: str, run_id: str, module_id: str) -> None:
        """Read it.

        Args:
            folder: where the marks lie; it need not exist.
            peer_id: of the key.
            run_id: of the run.
            module_id: of the module.
        """
        self.file = folder / f"{peer_id}.{run_id}.{module_id}.json"
        self._is_unknown = False
        """Something was signed, and nobody knows how much: the mark is unreadable, or elsewhere."""
        self._height = self._read()
        if self._height is None and imported_mark(folder, peer_id).exists():
            self._is_unknown = True

    def has_lost(self, highest_own: int | None) -> bool:
        """Return whether records are missing that were signed.

        Args:
            highest_own: the greatest height of the own records on the disk; None: there are none.
        """
        if self._is_unknown:
            return True
        return self._height is not None and (highest_own is None or highest_own < self._height)

    def note(self, height: int) -> None:
        """Have it on the disk that `height` is signed for: once that is kept, before it is sent.

        Who did not know how far it had signed has listened before it signs this: from here on it
        knows.

        Raises:
            StorageFullError: the disk is full, and nothing may be sent.
            OSError: the file cannot be written, and nothing may be sent.
        """
        if self._height is not None and self._height >= height:
            return
        make_private_dir(self.file.parent)
        replace_file(self.file, msgspec.json.encode(_Mark(height=height)))
        self._height = height
        self._is_unknown = False

    def _read(self) -> int | None:
        try:
            with self.file.open("rb") as stream:
                return _decoder.decode(stream.read(MAX_FILE_BYTES)).height
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("%s is not readable, so it counts as a loss: %s", self.file, error)
            self._is_unknown = True
            return None
