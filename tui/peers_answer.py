"""What is said about peers as a whole: none, or some that cannot work with this agent.

Runs in: tui and command line. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from tui.view_state import align, peer_table
from tui.wording import clean
from volunteer.answers import PeerStatus, Status

UPDATE = "update with `sh packaging/install.sh` from a newer copy"
_WIDTH = 160
_NOBODY = "No peers. The agent trains alone, as a swarm of one, until some are found."


def peers_answer(listed: Sequence[PeerStatus], status: Status) -> tuple[str, ...]:
    """Return the lines of `allmende peers`."""
    note = protocol_note(status)
    if not listed:
        return (note or _NOBODY,)
    table = align(peer_table(listed, own_state=status.state_hash), _WIDTH)
    return (*table, *excluded_notes(listed), *([note] if note else []))


def excluded_notes(listed: Sequence[PeerStatus]) -> tuple[str, ...]:
    """Return a sentence for each peer whose work has no weight just now."""
    return tuple(
        f"{clean(peer.peer_id)} is excluded through round {peer.excluded_until_round}: its work was"
        " found bad twice, and has no weight."
        for peer in listed
        if peer.excluded_until_round is not None
    )


def protocol_note(status: Status) -> str:
    """Return a sentence about the peers that cannot work with this agent; empty if there is none.

    `2 peers speak protocol 2, this is 1: update with ...`
    """
    if not status.differing_peers:
        return ""
    own = status.protocol.partition(".")[0]
    counts = sorted(status.differing_peers.items(), key=lambda one: _number(one[0]), reverse=True)
    who = " and ".join(_speaks(num_peers, major) for major, num_peers in counts)
    is_newer = _number(counts[0][0]) > _number(own)
    return f"{who}, this is {own}: {UPDATE if is_newer else 'they have to be updated'}."


def _number(major: str) -> int:
    return int(major) if major.isascii() and major.isdecimal() else 0


def _speaks(num_peers: int, major: str) -> str:
    return f"{num_peers} {'peer speaks' if num_peers == 1 else 'peers speak'} protocol {major}"
