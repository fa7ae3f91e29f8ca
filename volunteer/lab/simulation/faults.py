"""The faults by name, and the scenario that any choice of them makes.

Runs in: simulation, command line. Each name sets fields of `Scenario`; the names of lies are those
of `byzantine.LIES`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import replace

from volunteer.lab.simulation.byzantine import LIES, WORK_LIES
from volunteer.lab.simulation.scenario import Scenario
from volunteer.lab.simulation.world import Net

PERFECT = Net(sigma=0.02, median_s=0.5, loss=0.0, duplicates=0.0)
"""All messages arrive, in order, after about half a second."""
ENVIRONMENT = {
    "loss": "5 % of all messages are lost",
    "duplication": "2 % arrive twice",
    "reordering": "delays differ by a factor of 3 either way, so that messages overtake each other",
    "delay": "the median delay is 1 s of a round of 100 s: a twentieth of the failover interval",
    "partitions": "in one round of ten the net splits in two, for up to three rounds",
    "crashes": "5 % a member and round: processes end with no last word, and start again",
    "disk-loss": "0.5 %: a member loses all but its key",
    "clock-jumps": "2 %: a clock goes forward by up to 6 rounds (an hour of real ones)",
    "slow-peers": "speeds of computing and of links differ by a factor of 100",
    "sleepers": "2 %: a lid is closed for up to 6 rounds",
    "capped-list": "a commit lists at most four fifths of the members",
    "leaving": "3 %: a member says farewell, and comes back after 3 to 9 rounds",
}
"""Name, and what goes wrong."""
FAULTS = (*ENVIRONMENT, *LIES)
"""What `all` means; lies about work are asked for by their names."""
LIARS_OF = 6
"""One member in so many is a liar."""
LIES_PER_LIAR = 2


class UnknownFaultError(ValueError):
    """No fault has that name; the message says which is meant."""


def parse_faults(text: str) -> frozenset[str]:
    """Return the faults that `all`, `none` or a list with commas names.

    Raises:
        UnknownFaultError: a name is not one of `FAULTS` or `WORK_LIES`.
    """
    if text == "all":
        return frozenset(FAULTS)
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == ["none"]:
        return frozenset()
    there_are = (*FAULTS, *WORK_LIES)
    for name in names:
        if name not in there_are:
            close = difflib.get_close_matches(name, there_are, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(there_are)}"
            raise UnknownFaultError(f"no fault is called {name!r}; {hint}")
    if not names:
        raise UnknownFaultError("name at least one fault, or `none`, or `all`")
    return frozenset(names)


def make_scenario(
    num_members: int, num_rounds: int, faults: Collection[str], *, mesh_degree: int = 0
) -> Scenario:
    """Return the scenario in which these faults happen, and quiet rounds after them."""
    chosen = frozenset(faults)
    lies = tuple(lie for lie in (*LIES, *WORK_LIES) if lie in chosen)

    def rate(name: str, per_member_and_round: float) -> float:
        return per_member_and_round if name in chosen else 0.0

    net = replace(
        PERFECT,
        loss=rate("loss", 0.05),
        duplicates=rate("duplication", 0.02),
        mesh_degree=min(mesh_degree, num_members - 1),
    )
    if "reordering" in chosen:
        net = replace(net, sigma=1.0)
    if "delay" in chosen:
        net = replace(net, median_s=1.0)
    num_liars = max(1, num_members // LIARS_OF) if lies and num_members > 1 else 0
    return Scenario(
        num_members=num_members,
        num_rounds=num_rounds,
        ends_when_healed=True,
        net=net,
        partition_rate=rate("partitions", 0.1),
        crash_rate=rate("crashes", 0.05),
        disk_loss_rate=rate("disk-loss", 0.005),
        clock_jump_rate=rate("clock-jumps", 0.02),
        freeze_rate=rate("sleepers", 0.02),
        leave_rate=rate("leaving", 0.03),
        speed_range=100.0 if "slow-peers" in chosen else 1.0,
        max_contributions=max(1, 4 * num_members // 5) if "capped-list" in chosen else 32,
        num_liars=num_liars,
        lies=lies,
        lies_per_liar=LIES_PER_LIAR,
        quorum=(2, 3) if lies else (1, 2),
    )
