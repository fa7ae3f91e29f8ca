"""`allmende lab`: experiments on this machine, without an agent.

Runs in: the command line. What an experiment needs is imported when it runs.
"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from tui import lab_training
from tui.arguments import AsJson

MAX_PEERS, MAX_ROUNDS, MAX_SEEDS, MAX_SEED = 2000, 1000, 100_000, 2**31

lab_app = typer.Typer(help="Experiments on this machine; none needs an agent.")


@lab_app.callback()
def lab() -> None:
    """Experiments on this machine; none needs an agent."""


lab_app.command("list", epilog=lab_training.EXIT_STATUS)(lab_training.list_experiments)
lab_app.command(epilog=lab_training.EXIT_STATUS)(lab_training.run)
lab_app.command(epilog=lab_training.EXIT_STATUS)(lab_training.reproduce)
lab_app.command(epilog=lab_training.EXIT_STATUS)(lab_training.table)
lab_app.command()(lab_training.presets)


@lab_app.command()
def simulate(
    peers: Annotated[
        int, typer.Option(metavar="N", min=1, max=MAX_PEERS, help="Members of the swarm.")
    ] = 8,
    rounds: Annotated[
        int,
        typer.Option(metavar="R", min=1, max=MAX_ROUNDS, help="Rounds in which things go wrong."),
    ] = 20,
    seed: Annotated[
        int, typer.Option(metavar="S", min=0, max=MAX_SEED, help="The same run again.")
    ] = 0,
    seeds: Annotated[
        int, typer.Option(metavar="K", min=1, max=MAX_SEEDS, help="So many, from --seed on.")
    ] = 1,
    faults: Annotated[
        str,
        typer.Option(metavar="all|none|LIST", help="What goes wrong: names with commas between."),
    ] = "all",
    mesh: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=64, help="Gossip neighbours; 0: all reach all."),
    ] = 8,
    as_json: AsJson = False,
) -> None:
    """Run the round protocol of many members in virtual time, over a net that fails.

    Every invariant of the protocol is checked at every step. Exit status 1: one is broken, or the
    members did not end on one chain; the seed that shows it is named.
    """
    from volunteer.lab.simulation import summary
    from volunteer.lab.simulation.faults import UnknownFaultError, make_scenario, parse_faults

    try:
        chosen = parse_faults(faults)
    except UnknownFaultError as error:
        raise typer.BadParameter(str(error), param_hint="'--faults'") from error
    scenario = make_scenario(peers, rounds, chosen, mesh_degree=mesh)
    results = []
    if not as_json:
        names = ", ".join(sorted(chosen)) or "none"
        _write(f"{peers} peers, {rounds} rounds; faults: {names}", "", summary.HEADER)
    for result in summary.run_seeds(scenario, range(seed, seed + seeds)):
        results.append(result)
        if not as_json:
            _write(summary.row(result))
    if as_json:
        said = {"peers": peers, "rounds": rounds, "faults": sorted(chosen), "seeds": results}
        _write(msgspec.json.encode(said).decode())
    else:
        _write(*summary.closing_lines(results))
    if not all(result.is_right for result in results):
        sys.exit(1)


def _write(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
