"""What is shown, as pure functions of what the agent says.

Runs in: tui and command line. The screens only lay these words out. Nothing here claims what the
agent has not said: before the first status there is `connecting`, and None is "not yet".
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from tui import pause_words
from tui.wording import (
    NOT_YET,
    clean,
    format_bytes,
    format_duration,
    format_instant,
    format_loss,
    format_rate,
    format_stopwatch,
    format_tokens,
    format_train_loss,
    format_utc,
    short_id,
)
from volunteer.answers import PeerStatus, RoundPoint, Stats, Status

Row = tuple[str, str]
"""Label, value."""


class Link(enum.Enum):
    """How the view stands with the agent."""

    CONNECTING = "connecting"
    STARTING = "starting"
    """The view is starting an agent itself."""
    LIVE = "live"
    SILENT = "silent"
    """Connected, but nothing comes."""
    GONE = "gone"
    FAULTY = "faulty"
    """It answers, but not so that we understand it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that the view knows at one moment."""

    link: Link = Link.CONNECTING
    note: str = ""
    """Why the link is as it is; empty while live."""
    hint: str = ""
    status: Status | None = None
    status_at: datetime | None = None
    """Wall clock when `status` came."""
    stats: Stats | None = None
    peers: tuple[PeerStatus, ...] | None = None
    history: tuple[RoundPoint, ...] | None = None
    flags: tuple[str, ...] = ()
    """What the agent was started with, and is started with again."""
    problem: str = ""
    """Why the tables could not be brought up to date; empty if they could."""

    @property
    def is_current(self) -> bool:
        """Whether the values shown are the agent's present ones."""
        return self.link is Link.LIVE and self.status is not None


@dataclass(frozen=True, slots=True)
class Headline:
    """The state, the one reason, and what ends it."""

    mark: str
    title: str
    reason: str
    ends: str
    """What ends it, as a sentence; empty where nothing has to end."""
    level: str
    """good, rest, busy or bad: the colour, never the only sign."""


@dataclass(frozen=True, slots=True)
class RoundProgress:
    """The current round's time box."""

    label: str
    fraction: float | None
    """0..1; None if the agent has not named a round length."""
    text: str


_STATES = {
    "contributing": ("●", "Contributing", "good"),
    "paused": ("‖", "Paused", "rest"),
    "waiting": ("○", "Waiting", "rest"),
    "starting": ("◔", "Starting", "busy"),
    "catching_up": ("»", "Catching up", "busy"),
    "stopped": ("■", "Stopped", "rest"),
}


_GOES_ON = "It goes on when"
_ENDS = {
    "paused": "It resumes when",
    "waiting": "It resumes when",
    "starting": "It contributes when",
    "catching_up": "It contributes when",
}
"""How `resumes_when` becomes a sentence."""


def headline(snapshot: Snapshot) -> Headline:
    """Return what the first line says: a broken link comes before the last known state."""
    if snapshot.link is Link.STARTING:
        return Headline("◔", "Starting the agent", clean(snapshot.note), "", "busy")
    if snapshot.link is Link.SILENT:
        return Headline("!", "No answer", clean(snapshot.note), "", "bad")
    if snapshot.link is Link.FAULTY:
        return Headline("!", "Not understood", clean(snapshot.note), clean(snapshot.hint), "bad")
    if snapshot.link is Link.GONE:
        reason = clean(snapshot.note) or "No agent is running: this machine does not contribute."
        flags = clean(shlex.join(snapshot.flags))
        how = f"Press s to start it as it ran: {flags}" if flags else "Press s to start it."
        return Headline("■", "Not running", reason, how, "bad")
    if snapshot.status is None:
        return Headline("◔", "Connecting", "Waiting for the agent's first answer.", "", "busy")
    return state_headline(snapshot.status)


def state_headline(status: Status) -> Headline:
    """Return the agent's state in words; with an alarm no state looks good."""
    mark, title, level = _STATES.get(status.state, ("?", clean(status.state, limit=24), "busy"))
    reason = _sentence(status.reason)
    ends = _sentence(f"{_ENDS.get(status.state, _GOES_ON)} {status.resumes_when}")
    ends = ends if status.resumes_when else ""
    if status.alarm:
        return Headline("!", title, f"{reason} Alarm: {_sentence(status.alarm)}", ends, "bad")
    return Headline(mark, title, reason, ends, level)


def _sentence(text: str) -> str:
    """Return `text` with a capital and a full stop."""
    shown = clean(text).strip()
    if not shown:
        return ""
    return f"{shown[0].upper()}{shown[1:]}{'' if shown[-1] in '.!?…' else '.'}"


def state_sentence(status: Status) -> str:
    """Return state, reason and what ends it as one line of text."""
    head = state_headline(status)
    why = " ".join(part for part in (head.reason, head.ends) if part)
    return f"{head.title}: {why}" if why else head.title


def activity(status: Status) -> str:
    """Say in plain words what the processes do now."""
    kept = format_tokens(status.tokens_since_contribution)
    if status.state == "contributing":
        if status.trainer_pid is None:
            return "The trainer is being started."
        device = clean(status.device, limit=40) or "the device"
        doing = f"Training on {device}, inner step {status.inner_step}; {kept} not sent yet."
        return " ".join(filter(None, (doing, pause_words.finish_sentence(status))))
    if status.state == "catching_up":
        return "Getting the swarm's shared weights; training begins after that."
    if status.state in ("paused", "waiting"):
        if status.trainer_pid is not None:
            ending = "; it saves its work, then ends" if status.state == "paused" else ""
            return f"The trainer (process {status.trainer_pid}) still runs{ending}."
        is_kept = status.tokens_since_contribution > 0
        held = f"{kept} are kept here, and sent later." if is_kept else ""
        return " ".join(filter(None, ("No trainer runs.", held, pause_words.released(status))))
    return ""


def round_progress(status: Status) -> RoundProgress:
    """Return how far the round's time box is used up."""
    label = f"Round {status.round_index}"
    elapsed_s, round_s = status.round_elapsed_s, status.round_s
    if round_s <= 0.0:
        return RoundProgress(label, None, NOT_YET)
    box = f"{format_stopwatch(elapsed_s)} of {format_stopwatch(round_s)}"
    if elapsed_s >= round_s:
        return RoundProgress(label, 1.0, f"{box}, closing")
    return RoundProgress(label, max(0.0, elapsed_s) / round_s, box)


def speed_rows(status: Status) -> tuple[Row, ...]:
    """Return loss and speed; a paused machine has no speed, rather than a speed not yet known."""
    is_resting = status.state in ("paused", "waiting", "stopped") and status.trainer_pid is None
    own = "none while it rests" if is_resting else format_rate(status.tokens_per_s)
    return (
        ("Held-out loss", format_loss(status.held_out_loss, status.held_out_stderr, "nats/byte")),
        ("Train loss", format_train_loss(status.train_loss, status.bytes_per_token)),
        ("This machine", own),
        ("Swarm", f"{format_rate(status.swarm_tokens_per_s)}, {peers_phrase(status.num_peers)}"),
    )


def peers_phrase(num_peers: int) -> str:
    """Return `no peers`, `1 peer` or `n peers`."""
    return "1 peer" if num_peers == 1 else f"{num_peers or 'no'} peers"


def total_rows(snapshot: Snapshot, now: datetime, *, is_brief: bool) -> tuple[Row, ...]:
    """Return the two totals, each with its as-of time; brief for narrow windows."""
    status, stats = snapshot.status, snapshot.stats or Stats()
    if status is None:
        return ()
    seen = format_instant(snapshot.status_at, now) if snapshot.status_at else NOT_YET
    # Both only grow, so the larger one is the newer one: the ledger's before the trainer has
    # spoken, the status's between two looks at the ledger.
    done, done_at = status.tokens_done, seen
    if stats.tokens_done > done:
        done, done_at = stats.tokens_done, format_utc(stats.done_as_of_utc, now)
    confirmed, confirmed_at = status.tokens_confirmed, seen
    if stats.tokens_confirmed >= confirmed:
        confirmed = stats.tokens_confirmed
        confirmed_at = format_utc(stats.confirmed_as_of_utc, now)
    middle, by_whom = (", ", ", ") if is_brief else (", as of ", " by the swarm, as of ")
    confirmed_text = f"{format_tokens(confirmed)}{by_whom}{confirmed_at}"
    return (
        ("Done here", f"{format_tokens(done)}{middle}{done_at}"),
        ("Confirmed", confirmed_text if confirmed else NOT_YET),
    )


def as_of(snapshot: Snapshot, now: datetime) -> str:
    """Return the note that old values carry; empty while they are current."""
    if snapshot.is_current or snapshot.status_at is None:
        return ""
    return f"as of {format_instant(snapshot.status_at, now)}"


def loss_points(history: Sequence[RoundPoint] | None) -> tuple[tuple[int, float | None], ...]:
    """Return (round, held-out loss) in order of rounds; None where none was measured."""
    points = {point.round_index: point.held_out_loss for point in history or ()}
    return tuple(sorted(points.items()))


def peer_table(peers: Sequence[PeerStatus], *, own_state: str = "") -> tuple[tuple[str, ...], ...]:
    """Return rows of cells, the first one being the headings.

    Args:
        peers: what the agent told.
        own_state: our state hash; empty if not known, and then no peer is judged by it.
    """
    head = ("Peer", "Dir", "Ping", "Round", "Speed", "Weights", "Heard", "Address")
    return (head, *(_peer_row(peer, own_state) for peer in peers))


def _peer_row(peer: PeerStatus, own_state: str) -> tuple[str, ...]:
    rtt = NOT_YET if peer.rtt_ms is None else f"{peer.rtt_ms:.0f} ms"
    round_text = NOT_YET if peer.round_index is None else str(peer.round_index)
    heard = NOT_YET if peer.last_heard_s is None else f"{format_duration(peer.last_heard_s)} ago"
    if not peer.state_hash or not own_state:
        state = NOT_YET
    else:
        state = "same" if peer.state_hash == own_state else "other"
    return (
        short_id(peer.peer_id),
        clean(peer.direction, limit=8),
        rtt,
        round_text,
        format_rate(peer.tokens_per_s),
        state,
        heard,
        clean(peer.addr, limit=80),
    )


def align(table: Sequence[Sequence[str]], width: int) -> tuple[str, ...]:
    """Lay `table` out in columns; columns that do not fit into `width` cells are left out."""
    if not table:
        return ()
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    shown = 1
    while shown < len(widths) and sum(widths[: shown + 1]) + 2 * shown <= width:
        shown += 1
    return tuple(
        "  ".join(row[i].ljust(widths[i]) for i in range(shown)).rstrip()[:width] for row in table
    )


def stats_rows(stats: Stats, now: datetime) -> tuple[Row, ...]:
    """Return every figure of `allmende stats`."""
    energy = "not measured here" if stats.energy_kwh is None else f"{stats.energy_kwh:.2f} kWh"
    return (
        ("Done here", _with_time(stats.tokens_done, stats.done_as_of_utc, now)),
        (
            "Confirmed by the swarm",
            _with_time(stats.tokens_confirmed, stats.confirmed_as_of_utc, now),
        ),
        ("Sent, not final yet", format_tokens(stats.tokens_in_flight)),
        ("Kept here, not sent", format_tokens(stats.tokens_pending)),
        ("Refused", format_tokens(stats.tokens_refused)),
        ("Dropped", format_tokens(stats.tokens_dropped)),
        ("Inner steps", str(stats.inner_steps)),
        ("Rounds confirmed", str(stats.rounds_confirmed)),
        ("Rounds refused", str(stats.rounds_refused)),
        ("Time contributed", format_duration(stats.contributed_s)),
        ("Energy", energy),
    )


def _with_time(tokens: int, utc_text: str, now: datetime) -> str:
    if not tokens and not utc_text:
        return NOT_YET
    return f"{format_tokens(tokens)}, as of {format_utc(utc_text, now)}"


def traffic_table(stats: Stats) -> tuple[tuple[str, ...], ...]:
    """Return rows of (purpose, sent, received), the first one being the headings."""
    rows = [
        (
            clean(purpose, limit=24),
            format_bytes(counts.get("sent", 0)),
            format_bytes(counts.get("received", 0)),
        )
        for purpose, counts in sorted(stats.bytes_by_purpose.items())
    ]
    return (("Traffic", "Sent", "Received"), *rows)


def _data_text(status: Status) -> str:
    if not status.data_budget_bytes:
        return ""
    used, budget = map(format_bytes, (status.data_used_bytes, status.data_budget_bytes))
    offline = "" if status.is_online else "; the network is off until it is renewed"
    return f"{used} of {budget} used this month (UTC){offline}"


def status_lines(status: Status, now: datetime) -> tuple[str, ...]:
    """Return `allmende status` for people."""
    held = f"no weights are sent or fetched: {clean(status.network_held)}"
    is_other = bool(status.network_held) and status.network_held != status.reason
    rows = [
        ("Run", f"{clean(status.run_name) or NOT_YET}  {status.run_id[:12]}".rstrip()),
        ("Round", _round_text(status)),
        ("Now", activity(status)),
        ("At a time", _micro_batch_text(status)),
        ("Next start", pause_words.next_start(status, now)),
        ("Network", held if is_other else ""),
        ("Data", _data_text(status)),
        ("Left out", clean(status.data_note)),
        ("Memory", clean(status.memory_note)),
        ("Excluded", _excluded_text(status)),
        ("A pause now", pause_words.cost_sentence(status) if _may_pause(status) else ""),
        *speed_rows(status),
        ("Done here", format_tokens(status.tokens_done)),
        ("Confirmed", _confirmed_text(status)),
        ("Peer id", clean(status.peer_id) or NOT_YET),
        *(("Listening", clean(addr)) for addr in status.listen_addrs),
        ("Agent", f"process {status.agent_pid}"),
    ]
    return (state_sentence(status), *(f"  {label:<14} {value}" for label, value in rows if value))


def _micro_batch_text(status: Status) -> str:
    found = status.micro_batch
    return clean(found.note) if found is not None and status.trainer_pid is not None else ""


def _excluded_text(status: Status) -> str:
    end = status.excluded_until_round
    return "" if end is None else f"our work has no weight through round {end}: found bad twice"


def _may_pause(status: Status) -> bool:
    return pause_words.is_training(status) and status.finishes_round is None


def _round_text(status: Status) -> str:
    return f"{status.round_index}, {round_progress(status).text}"


def _confirmed_text(status: Status) -> str:
    if status.last_confirmed_s is None:
        return NOT_YET
    ago = format_duration(status.last_confirmed_s)
    return f"{format_tokens(status.tokens_confirmed)}, last {ago} ago"


def closing_note(snapshot: Snapshot) -> str:
    """Say what goes on after the view is closed, as far as it is known."""
    if snapshot.link is Link.GONE:
        return "The view is closed. No agent is running: this machine does not contribute."
    if snapshot.link is Link.STARTING or snapshot.status is None:
        return "The view is closed. `allmende status` says whether this machine contributes."
    return (
        "The view is closed; the agent goes on in the background.\n"
        "  see it again: allmende    pause: allmende pause    stop it: allmende stop"
    )
