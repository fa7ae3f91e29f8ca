"""`allmende publish`: signs a RunSpec as its publisher.

Runs in: the command line. Who signs a run is its first member, says that it is his own, and so may
have it read the files that it names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from tui.arguments import AsJson
from tui.wording import clean
from volunteer.errors import RunSpecError, VolunteerError
from volunteer.locations import Locations

if TYPE_CHECKING:
    from volunteer.run import RunSpec

_SPEC_MODE = 0o644


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """What was signed; `allmende publish --json`."""

    spec_file: str
    run_id: str
    run_name: str
    publisher: str


def publish(
    run_file: Annotated[Path, typer.Argument(metavar="FILE", help="A RunSpec of your own.")],
    as_json: AsJson = False,
) -> None:
    """Sign a RunSpec as its publisher, in the file; any change of it needs another signature."""
    locations = Locations.from_environment(os.environ)
    locations.prepare()
    signed = sign_file(run_file, locations)
    made = Published(
        spec_file=str(run_file.absolute()),
        run_id=signed.run_id,
        run_name=signed.name,
        publisher=signed.publisher,
    )
    sys.stdout.write((msgspec.json.encode(made).decode() if as_json else publish_text(made)) + "\n")


def sign_file(file: Path, locations: Locations) -> RunSpec:
    """Write this volunteer's name and signature into a RunSpec file; the rest of it stays.

    Raises:
        RunSpecError: it is not valid, or another volunteer's.
        ConfigError: its lines cannot be changed.
        VolunteerError: the key cannot be read, or the file not be written; the old file stays.
    """
    from p2p.errors import IdentityError
    from p2p.identity import load_or_create_identity
    from volunteer.config_file import with_line, without_key
    from volunteer.files import replace_file
    from volunteer.run import MAX_SPEC_BYTES, parse_run_spec, read_run_spec, signed_bytes

    spec = read_run_spec(file)
    try:
        identity = load_or_create_identity(locations.identity_file)
    except IdentityError as error:
        raise VolunteerError(str(error), hint=error.hint) from error
    if spec.publisher not in ("", identity.peer_id):
        raise RunSpecError(
            f"{file}: its publisher is {spec.publisher}",
            hint="a run of your own has another `name`, and no `publisher` yet: take that line out",
        )
    own = msgspec.structs.replace(spec, publisher=identity.peer_id)
    signature = identity.sign(signed_bytes(own)).hex()
    text = file.read_text("utf-8")
    for key, value in (("signature", signature), ("publisher", identity.peer_id)):
        text = with_line(without_key(text, key), f'{key} = "{value}"')
    if len(text.encode()) > MAX_SPEC_BYTES:
        raise RunSpecError(f"{file}: with the signature larger than {MAX_SPEC_BYTES} bytes")
    signed = parse_run_spec(text, source=str(file))
    try:
        replace_file(file, text.encode(), mode=_SPEC_MODE)
    except OSError as error:
        raise VolunteerError(f"{file} cannot be written: {error.strerror}") from error
    return signed


def publish_text(made: Published) -> str:
    """Return what a person is told."""
    return (
        f"Run {clean(made.run_name)} is signed by this volunteer; its id is {made.run_id}.\n"
        f"  take part:  allmende start --run-file {clean(made.spec_file)}\n"
        "  others start with the same file. You are its first member: none of its rounds is final"
        " before you have taken part."
    )
