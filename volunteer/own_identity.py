"""The owner's hands on the key: see it, keep a copy, put a copy in its place.

Runs in: the command line; the agent asks where the mark of a key from elsewhere is.

Write order of an import: the mark that the key comes from elsewhere, away with what is known of how
far it has signed here (agent/signed_mark.py), the copy of the key before, the key. A kill leaves
the old key, which the mark of another means nothing to, or the new one.

A key that was in use elsewhere may have signed anything, and two different signatures of one round
are proof of lying. So who has such a mark listens before it signs.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2p.errors import IdentityError
from p2p.identity import Identity, copy_identity, load_or_create_identity
from volunteer.errors import AlreadyRunningError, VolunteerError
from volunteer.files import fsync_dir, lock_folder, make_private_dir, replace_file
from volunteer.locations import Locations

_STOP_HINT = "`allmende stop` first, then again"
_IMPORTED_SUFFIX = ".imported"


def imported_mark(signed_dir: Path, peer_id: str) -> Path:
    """Name the file that says that a key was used elsewhere before it came here."""
    return signed_dir / f"{peer_id}{_IMPORTED_SUFFIX}"


def read_identity(locations: Locations) -> Identity:
    """Return the key of this volunteer.

    Raises:
        VolunteerError: there is none yet, or it cannot be read.
    """
    if not locations.identity_file.exists():
        raise VolunteerError(
            "there is no identity yet",
            hint="`allmende start` makes one, or `allmende identity import FILE` takes one over",
        )
    with _in_our_words():
        return load_or_create_identity(locations.identity_file)


def export_identity(locations: Locations, file: Path) -> str:
    """Copy the key to a new file, for the owner alone; return its peer id.

    Raises:
        VolunteerError: there is no key, or the file exists or cannot be written.
    """
    read_identity(locations)
    with _in_our_words():
        return copy_identity(locations.identity_file, file).peer_id


def import_identity(locations: Locations, file: Path) -> tuple[str, Path | None]:
    """Put the key that is in `file` in the place of this volunteer's.

    Returns:
        Its peer id, and where the key before is kept; None if there was none, or the same.

    Raises:
        VolunteerError: an agent runs, the file holds no key, or the disk cannot be written.
    """
    locations.prepare()
    try:
        with lock_folder(locations.data_dir):
            return _import(locations, file)
    except AlreadyRunningError as error:
        raise VolunteerError("an agent runs with the key that is here", hint=_STOP_HINT) from error
    except OSError as error:
        raise VolunteerError(
            f"{error.filename or locations.identity_file}: {error.strerror or error}"
        ) from error


def _import(locations: Locations, file: Path) -> tuple[str, Path | None]:
    own_file = locations.identity_file
    new_file = own_file.with_name(f".{own_file.name}.import")
    new_file.unlink(missing_ok=True)  # a killed import's
    try:
        with _in_our_words():
            identity = copy_identity(file, new_file)
        before = _peer_id_in(own_file)
        _note_imported(locations.signed_dir, identity.peer_id)
        if before == identity.peer_id:
            return identity.peer_id, None
        kept_file = _keep(own_file, before) if own_file.exists() else None
        replace_file(own_file, new_file.read_bytes())
        return identity.peer_id, kept_file
    finally:
        new_file.unlink(missing_ok=True)


def _note_imported(signed_dir: Path, peer_id: str) -> None:
    make_private_dir(signed_dir)
    replace_file(imported_mark(signed_dir, peer_id), b"")
    for mark in signed_dir.glob(f"{peer_id}.*.json"):  # base58 and hex: nothing to escape
        mark.unlink()
    fsync_dir(signed_dir)


def _peer_id_in(own_file: Path) -> str:
    """Return whose key is here; empty if none is, or it is damaged: an import is the cure."""
    if not own_file.exists():
        return ""
    try:
        return load_or_create_identity(own_file).peer_id
    except IdentityError:
        return ""


def _keep(own_file: Path, peer_id: str) -> Path:
    """Copy the key to a file that has its peer id in its name, unless it is there already."""
    name = peer_id or f"damaged-{secrets.token_hex(4)}"
    kept_file = own_file.with_name(f"{own_file.stem}-{name}{own_file.suffix}")
    if not kept_file.exists():
        replace_file(kept_file, own_file.read_bytes())
    return kept_file


@contextmanager
def _in_our_words() -> Iterator[None]:
    try:
        yield
    except IdentityError as error:
        raise VolunteerError(str(error), hint=error.hint) from error
