"""`allmende identity`: the key that this volunteer is known by.

Runs in: the command line; it needs no agent, and an import wants none to run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tui.arguments import AsJson
from tui.wording import clean
from volunteer.locations import Locations

identity_app = typer.Typer(
    help="See, copy or replace the key that this volunteer is known by.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class IdentityAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints."""

    peer_id: str
    file: str
    """Where the key is, or its copy."""
    kept_file: str = ""
    """Where an import has kept the key before; empty if there was none, or the same."""


@identity_app.command("show")
def show(as_json: AsJson = False) -> None:
    """Print the peer id, and where the key is."""
    from volunteer.own_identity import read_identity

    locations = Locations.from_environment(os.environ)
    peer_id = read_identity(locations).peer_id
    answer = IdentityAnswer(peer_id=peer_id, file=_name_of(locations.identity_file))
    _tell(answer, f"{peer_id}\n  key: {clean(answer.file)} (show it to nobody)", as_json=as_json)


@identity_app.command("export")
def export_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A new file, for you alone.")],
    as_json: AsJson = False,
) -> None:
    """Copy the key to a file: a backup, or to move to another machine.

    Who has the key speaks in your name. It may be in use on one machine at a time only.
    """
    from volunteer.own_identity import export_identity

    peer_id = export_identity(Locations.from_environment(os.environ), file)
    answer = IdentityAnswer(peer_id=peer_id, file=_name_of(file.absolute()))
    _tell(
        answer,
        f"The key of {peer_id} is in {clean(answer.file)}, readable by you alone.\n"
        "  Who has it speaks in your name. Use it on one machine at a time: two that sign at once"
        " look like one that lies, and the swarm bans that.\n"
        "  take it over elsewhere: allmende identity import FILE",
        as_json=as_json,
    )


@identity_app.command("import")
def import_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `identity export` wrote.")],
    as_json: AsJson = False,
) -> None:
    """Take over the key in a file; the one before is kept. The agent must be stopped."""
    from volunteer.own_identity import import_identity

    locations = Locations.from_environment(os.environ)
    peer_id, kept_file = import_identity(locations, file)
    answer = IdentityAnswer(
        peer_id=peer_id,
        file=_name_of(locations.identity_file),
        kept_file=_name_of(kept_file) if kept_file is not None else "",
    )
    kept = f"\n  the key before is kept in {clean(answer.kept_file)}" if kept_file else ""
    _tell(
        answer,
        f"This volunteer is {peer_id} from the next start on.{kept}\n"
        "  It may have signed on another machine, so it listens for some rounds before it signs"
        " here; training goes on meanwhile. Do not use it there any more.",
        as_json=as_json,
    )


def _name_of(file: Path) -> str:
    """Return a file's name as text, whatever bytes it is."""
    return os.fsencode(file).decode("utf-8", "replace")


def _tell(answer: IdentityAnswer, text: str, *, as_json: bool) -> None:
    sys.stdout.write((msgspec.json.encode(answer).decode() if as_json else text) + "\n")
