"""`allmende import`: hands over to a process that makes a run of weights that exist.

Runs in: the command line. The way back from `allmende export`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tui.arguments import AsJson
from tui.wording import clean
from volunteer.answers import Imported
from volunteer.errors import VolunteerError
from volunteer.locations import Locations

IMPORT_COMMAND = (sys.executable, "-P", "-m", "volunteer.training.import_run")
_MAX_NAME_CHARS = 64


def import_model(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="As `save_pretrained` or `export` writes it.")
    ],
    spec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the RunSpec goes; default: NAME.toml here."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the run; default: the folder's.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A RunSpec to take data, rounds and rates from; default: commons."
        ),
    ] = None,
    is_bytes: Annotated[
        bool, typer.Option("--bytes", help="It has no tokenizer.json: its tokens are bytes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a run that begins from a Hugging Face model (Llama's shape); needs no agent."""
    run_name = name or name_of(directory)
    spec_file = (spec or Path(f"{run_name}.toml")).absolute()
    made = run_import(directory, spec_file, run_name, like, is_bytes=is_bytes)
    sys.stdout.write((msgspec.json.encode(made).decode() if as_json else import_text(made)) + "\n")


def name_of(directory: Path) -> str:
    """Return a run's name made of a folder's."""
    name = re.sub(r"[^a-z0-9_.-]+", "-", directory.absolute().name.lower()).strip("-_.")
    return name[:_MAX_NAME_CHARS] or "imported"


def run_import(
    directory: Path, spec_file: Path, name: str, like: Path | None, *, is_bytes: bool
) -> Imported:
    """Import in a process of its own.

    Raises:
        ConfigError: the data folder cannot be used.
        VolunteerError: the process has ended without a word.
        SystemExit: it cannot be done; the process has said why.
    """
    locations = Locations.from_environment(os.environ)
    locations.prepare()
    argv = ["--from", str(directory.absolute()), "--imports", str(locations.imports_dir)]
    argv += ["--spec", str(spec_file), f"--name={name}"]
    argv += ["--like", str(like.absolute())] if like is not None else []
    argv += ["--bytes"] if is_bytes else []
    process = subprocess.run(
        [*IMPORT_COMMAND, *argv],
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        check=False,
    )
    if process.returncode < 0:
        raise VolunteerError(
            f"the import was ended by signal {-process.returncode}",
            hint="the same command again takes up what is there",
        )
    if process.returncode != 0:
        sys.exit(process.returncode)
    return msgspec.json.decode(process.stdout, type=Imported)


def import_text(made: Imported) -> str:
    """Return what a person is told."""
    file = clean(made.spec_file)
    return (
        f"Run {clean(made.run_name)} begins from these {made.num_parameters:,} parameters;"
        f" its RunSpec is {file}.\n"
        "  Look through it before anybody joins: licence, sources and learning rate are yours to"
        " say. The weights are found by their hash, whatever else you change.\n"
        f"  take part:  allmende start --run-file {file}\n"
        f"  as its publisher:  allmende publish {file}, first\n"
        "  others start with the same file, and fetch the weights from you."
    )
