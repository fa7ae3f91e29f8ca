"""The command line: `allmende` and its verbs.

Runs in: the command line. Every verb is a client of the agent; what costs time to import (textual,
psutil) is imported by the verb that needs it. `--json` prints the structs of volunteer.messages.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import msgspec
import typer

from tui import arguments, launch
from tui.arguments import AsJson
from tui.client import DEADLINE_S, ControlClient
from tui.config_verb import config_app
from tui.demo import demo
from tui.doctor import doctor
from tui.export import export
from tui.identity_verb import identity_app
from tui.import_verb import import_model
from tui.lab import lab_app
from tui.publish_verb import publish
from tui.service_verb import service_app
from tui.setup import setup
from tui.stats_verb import stats
from tui.wording import clean
from volunteer.answers import PeerStatus, Status
from volunteer.errors import VolunteerError
from volunteer.locations import Locations
from volunteer.messages import DEFAULT_TEMPERATURE, MAX_SAMPLE_TOKENS, MAX_SEED
from volunteer.printable import printable

TAGLINE = "Lend your idle GPU to train an open model. A pause gives it back at once."

app = typer.Typer(
    help=f"{TAGLINE}\n\nWithout a command it opens the dashboard, and starts contributing if no"
    " agent runs yet, the first time only after it has said what it uses and you agree; without a"
    " terminal it prints the status, and starts nothing.",
    epilog="Exit status: 0 done, 1 refused or failed, 2 bad usage, 3 no agent runs.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(config_app, name="config")
app.add_typer(identity_app, name="identity")
app.add_typer(lab_app, name="lab")
app.add_typer(service_app, name="service")
app.command()(demo)
app.command()(doctor)
app.command()(export)
app.command("import")(import_model)
app.command()(publish)
app.command()(setup)
app.command()(stats)

LogSource = Literal["agent", "trainer", "aggregator", "sampler"]


def main() -> NoReturn:
    """Run the command line; every expected failure is one line with a hint and a status."""
    try:
        try:
            app(prog_name="allmende")
        finally:
            sys.stdout.flush()  # here, where a reader that left and a full disk are told
    except VolunteerError as error:
        sys.stderr.write(printable(f"allmende: {error}") + "\n")
        if error.hint:
            sys.stderr.write(printable(f"  hint: {error.hint}") + "\n")
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        # The reader (head, less) has enough, or the disk; a second error as the rest is flushed
        # would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno == errno.ENOSPC:
            sys.stderr.write("allmende: no space left for what is printed\n")
        sys.exit(1)
    sys.exit(0)


def _locations() -> Locations:
    return Locations.from_environment(os.environ)


def _client(*, deadline_s: float = DEADLINE_S) -> ControlClient:
    return ControlClient(_locations().control_socket, deadline_s=deadline_s)


def _write(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _write_json(value: object) -> None:
    _write(msgspec.json.encode(value).decode())


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        version()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def view(
    context: typer.Context,
    is_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Without a verb: the live view; starts the agent if none runs."""
    del is_version
    if context.invoked_subcommand is not None:
        return
    if not _can_draw():
        status()
        return
    from tui.app import run_app

    locations = _locations()
    # It starts an agent, which could not live in a folder that is not usable.
    locations.prepare()
    run_app(locations)


def _can_draw() -> bool:
    """Tell whether there is a terminal to draw on; Textual draws on stderr, so all three count."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()
    return is_terminal and os.environ.get("TERM", "") != "dumb"


@app.command()
def start(
    listen: Annotated[
        list[str] | None,
        typer.Option(metavar="MULTIADDR", help="Listen here, as /ip4/0.0.0.0/tcp/4001."),
    ] = None,
    bootstrap: Annotated[
        list[str] | None, typer.Option(metavar="MULTIADDR", help="Connect to this peer at first.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1; default: the best.")
    ] = None,
    run_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A RunSpec to take part in; default: `commons`."),
    ] = None,
    round_s: Annotated[
        float | None,
        typer.Option(
            metavar="S", callback=arguments.round_length, help="Round length, for your own run."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="CPU threads; 0: all but one.")
    ] = None,
    no_mdns: Annotated[bool, typer.Option("--no-mdns", help="No search in this network.")] = False,
    no_dht: Annotated[bool, typer.Option("--no-dht", help="No search through peers.")] = False,
    ignore_idle: Annotated[
        bool, typer.Option("--ignore-idle", help="Contribute whatever the idle policy says.")
    ] = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="Stay in this terminal; Ctrl+C stops it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start the agent in the background. Closing the terminal does not stop it."""
    options = launch.AgentOptions(
        listen=tuple(listen or ()),
        bootstrap=tuple(bootstrap or ()),
        no_mdns=no_mdns,
        no_dht=no_dht,
        ignore_idle=ignore_idle,
        device=device,
        run_file=run_file,
        round_s=round_s,
        threads=threads,
    )
    locations = _locations()
    running = launch.find_agent(locations)
    if running is None or options.to_argv():
        launch.verify_wishes(locations, options)
    if running is not None:
        current = launch.keep_running(locations, running, options)
    elif foreground:
        sys.exit(launch.exec_agent(options.to_argv()))
    else:
        current = launch.start_agent(locations, options.to_argv())
    if as_json:
        _write_json(current)
    else:
        _write(*_started(current, running))


def _started(current: Status, running: Status | None) -> tuple[str, ...]:
    what = "The agent runs now" if running is None else "An agent runs already"
    is_kept = running is not None and running.stops_then
    return (
        f"{what}, in the background (process {current.agent_pid}).",
        *(["  It was to stop with this round; now it does not."] if is_kept else []),
        *_status_head(current),
        "  see it: allmende    pause: allmende pause    stop it: allmende stop",
    )


def _status_head(current: Status) -> tuple[str, ...]:
    from tui.view_state import state_sentence

    return (f"  {state_sentence(current)}",)


@app.command()
def stop(
    is_finish: Annotated[
        bool, typer.Option("--finish", help="Finish the round that is trained now, then stop.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Stop the agent, after it has saved its work."""
    from tui import pause_verb

    pause_verb.stop(_locations(), is_finish=is_finish, as_json=as_json)


@app.command()
def pause(
    for_s: Annotated[
        float | None,
        typer.Option(
            "--for", metavar="DURATION", parser=arguments.duration, help="As 90s, 15m, 2h, 1d."
        ),
    ] = None,
    is_finish: Annotated[
        bool, typer.Option("--finish", help="Finish the round that is trained now, then pause.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pause at once and free the device; returns when it is free. Steps are saved first."""
    from tui import pause_verb

    pause_verb.pause(_locations(), for_s, is_finish=is_finish, as_json=as_json)


@app.command()
def resume(as_json: AsJson = False) -> None:
    """End the pause. Other reasons not to contribute still count."""
    from tui import pause_verb

    pause_verb.resume(_locations(), as_json=as_json)


@app.command()
def status(as_json: AsJson = False) -> None:
    """Say what the agent does, and why."""
    with _client() as client:
        current = client.request("status", Status)
    if as_json:
        _write_json(current)
        return
    from datetime import datetime

    from tui.peers_answer import protocol_note
    from tui.view_state import status_lines

    now = datetime.now().astimezone()
    _write(*status_lines(current, now), *filter(None, (protocol_note(current),)))


@app.command()
def peers(as_json: AsJson = False) -> None:
    """List the peers this machine is connected with."""
    with _client() as client:
        listed = client.request("peers", list[PeerStatus])
        status = client.request("status", Status)
    if as_json:
        _write_json(listed)
        return
    from tui.peers_answer import peers_answer

    _write(*peers_answer(listed, status))


@app.command()
def logs(
    is_following: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl+C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="LINES", min=0, max=100_000, help="How many.")
    ] = 50,
    source: Annotated[
        LogSource | None, typer.Option(help="Only this one's; default: all, by time.")
    ] = None,
) -> None:
    """Print the end of the logs; needs no agent."""
    from tui.logs import show_logs

    show_logs(_locations().log_dir, lines, source, is_following=is_following)


@app.command()
def sample(
    prompt: Annotated[str, typer.Argument(help="What the text goes on from.")] = "",
    max_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_SAMPLE_TOKENS, help="How many to write.")
    ] = 200,
    temperature: Annotated[
        float,
        typer.Option(
            metavar="T", callback=arguments.temperature, help="0: the likeliest each time."
        ),
    ] = DEFAULT_TEMPERATURE,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=MAX_SEED, help="The same text again; default: any."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print text from the shared weights; also while paused.

    It is written on the CPU: a GPU that is free for others stays so.
    """
    from tui.sample import ask_sample, sample_text

    written = ask_sample(_locations(), prompt, max_tokens, temperature, seed)
    if as_json:
        _write_json(written)
        return
    _write(sample_text(prompt, written))


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version of the program."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed_version

    try:
        text = installed_version("allmende")
    except PackageNotFoundError:
        text = "not installed (run from a checkout)"
    if as_json:
        _write_json({"version": text})
        return
    _write(f"allmende {clean(text)}")


if __name__ == "__main__":
    main()
