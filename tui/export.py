"""`allmende export`: hands over to a process that writes the shared weights for other programs.

Runs in: the command line.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tui.arguments import AsJson
from tui.client import ControlClient
from tui.wording import clean
from volunteer.answers import Status
from volunteer.errors import VolunteerError
from volunteer.locations import Locations

EXPORT_COMMAND = (sys.executable, "-P", "-m", "volunteer.training.export")


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What was written; `allmende export --json`."""

    directory: str
    run_id: str
    run_name: str
    round_index: int
    state_hash: str
    held_out_loss: float | None
    """Nats per byte, from the latest evaluation; None: not measured yet."""


def export(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Made if need be.")],
    as_json: AsJson = False,
) -> None:
    """Write the shared weights as Hugging Face's libraries load them.

    Also while paused: they are those of the latest round that is here.
    """
    exported = export_model(Locations.from_environment(os.environ), directory)
    text = msgspec.json.encode(exported).decode() if as_json else export_text(exported)
    sys.stdout.write(text + "\n")


def export_model(locations: Locations, folder: Path) -> Exported:
    """Write the weights of the latest commit into `folder`.

    Raises:
        ControlError: no agent runs, or it does not answer.
        VolunteerError: it has no weights yet.
        SystemExit: they cannot be written; the process has said why.
    """
    with ControlClient(locations.control_socket, deadline_s=20.0) as client:
        status = client.request("status", Status)
    if not status.state_hash:
        raise VolunteerError(
            "the shared weights are not here yet", hint="`allmende status` says how far they are"
        )
    argv = ["--run-dir", str(locations.run_dir(status.run_id)), "--into", str(folder.absolute())]
    argv += ["--state-hash", status.state_hash, "--round-index", str(status.round_index)]
    process = subprocess.run(
        [*EXPORT_COMMAND, *argv], cwd="/", stdin=subprocess.DEVNULL, check=False
    )
    if process.returncode != 0:
        sys.exit(process.returncode)
    return Exported(
        directory=str(folder.absolute()),
        run_id=status.run_id,
        run_name=status.run_name,
        round_index=status.round_index,
        state_hash=status.state_hash,
        held_out_loss=status.held_out_loss,
    )


def export_text(exported: Exported) -> str:
    """Return what a person is told."""
    loss = exported.held_out_loss
    measured = "" if loss is None else f", held-out loss {loss:.3f} nats/byte"
    return (
        f"The weights of {clean(exported.run_name)}, round {exported.round_index}{measured}, are in"
        f" {clean(exported.directory)}, as Hugging Face's transformers load them."
    )
