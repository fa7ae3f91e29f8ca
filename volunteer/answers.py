"""What the agent answers with over the control socket, and `--json` prints.

Runs in: agent, tui, import. Scripts rely on these: fields may be added, never renamed; units are in
the names. The requests and the conversation are messages.py.
"""

from __future__ import annotations

import msgspec

from volunteer.micro_batch import MicroBatch


class CatchUp(msgspec.Struct, frozen=True, kw_only=True):
    """A shared state on its way to this machine."""

    round_index: int
    """Height of the commit whose state it is."""
    held_bytes: int
    """On this disk and checked."""
    total_bytes: int
    bytes_per_s: float
    num_peers: int
    """Peers that are giving it now."""


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """What the last pause has given back, as it was verified."""

    after_s: float
    """From the word to the last process gone and the memory read again."""
    num_processes: int
    """That were ended: trainer, aggregator and all that they had started."""
    gpu_freed_bytes: int | None
    """GPU memory that came back; None: no GPU whose driver tells was used."""
    problem: str = ""
    """Who could not be ended, or holds memory still; empty where all is free."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`allmende status --json`: fields may be added, never renamed; units are in the names."""

    state: str
    """contributing, paused, waiting, starting, catching_up or stopped."""
    reason: str
    """The one reason for this state, as a sentence."""
    resumes_when: str
    """What ends it; empty while contributing."""
    resumes_at_utc: str = ""
    """The next possible start, e.g. `2026-11-30T18:00:00Z`, if nothing happens until then; empty
    while contributing, or where nobody can know."""
    run_id: str = ""
    run_name: str = ""
    round_index: int = 0
    """Height of the tip: the round being trained is the one that makes round_index + 1."""
    inner_step: int = 0
    state_hash: str = ""
    tip: str = ""
    held_out_loss: float | None = None
    """Nats per byte of the shared state, from the latest evaluation."""
    held_out_stderr: float | None = None
    """Its standard error over the windows that it was measured on."""
    held_out_windows: int | None = None
    """How many those are."""
    train_loss: float | None = None
    """Nats per token."""
    bytes_per_token: float | None = None
    """Of the held-out text; None: not measured yet."""
    tokens_per_s: float = 0.0
    num_peers: int = 0
    peer_id: str = ""
    listen_addrs: tuple[str, ...] = ()
    agent_pid: int = 0
    trainer_pid: int | None = None
    aggregator_pid: int | None = None
    device: str = ""
    micro_batch: MicroBatch | None = None
    """How many sequences the trainer takes at a time, and why; None: it has not tried yet."""
    last_confirmed_s: float | None = None
    """Seconds since the swarm last confirmed a contribution of ours; None: never yet."""
    round_elapsed_s: float = 0.0
    round_s: float = 0.0
    grace_s: float = 0.0
    """How long a proposer waits for stragglers, as measured exchanges have it."""
    failover_s: float = 0.0
    """How long each next rank waits for the one before it."""
    final_round_index: int = 0
    swarm_tokens_per_s: float = 0.0
    tokens_done: int = 0
    tokens_confirmed: int = 0
    tokens_since_contribution: int = 0
    bytes_by_purpose: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """As in `Stats`, since this agent started."""
    release: Release | None = None
    """What the last stop of the trainer gave back; None while contributing, and before the first.
    """
    finishes_round: int | None = None
    """The round after whose close it pauses or stops, as the owner said; None: no such word."""
    stops_then: bool = False
    """Whether the agent ends with that round."""
    network_held: str = ""
    """Why blobs and states are neither sent nor fetched just now; empty: they are."""
    catch_up: CatchUp | None = None
    """How far the fetch of the swarm's shared weights is; None while none is fetched."""
    excluded_until_round: int | None = None
    """Through which round work of this machine has no weight, since it was found bad twice; None:
    it has."""
    alarm: str = ""
    """Set when the round protocol had to stop (ROUNDS.md rule 18)."""
    data_used_bytes: int = 0
    """That the network has carried in this calendar month (UTC), both directions."""
    data_budget_bytes: int = 0
    """Of a month, as the owner allows; 0: no limit."""
    is_restarting: bool = False
    """Whether the agent begins anew in its own place: it is back within seconds, by itself."""
    memory_note: str = ""
    """Why nothing is done about the agent's own memory, which is above its limit; mostly empty."""
    data_note: str = ""
    """What of the run's data is left out on this machine, and what mends that; mostly empty."""
    is_online: bool = True
    """False where the month's data budget is used up: then there are no connections."""
    protocol: str = ""
    """What this agent speaks: major.minor."""
    differing_peers: dict[str, int] = msgspec.field(default_factory=dict)
    """Another major version -> how many peers of this run, heard within the hour, speak it. They
    cannot work with this agent, and are not kept connected."""


class PeerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `allmende peers --json`."""

    peer_id: str
    addr: str
    direction: str
    rtt_ms: float | None
    connected_s: float
    round_index: int | None
    tokens_per_s: float | None
    state_hash: str | None
    last_heard_s: float | None
    is_relayed: bool = False
    """Whether a third peer passes on all bytes; else the connection is direct."""
    last_final_round: int | None = None
    """The last final round that lists a contribution of this peer; None: none does."""
    protocol: str | None = None
    """What it says that it speaks: major.minor; None: it has not said hello."""
    program: str | None = None
    """What it says that it is, e.g. "allmende 0.1.0"; a peer may have chosen it."""
    excluded_until_round: int | None = None
    """Through which round its work has no weight, since it was found bad twice; None: it has."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """`allmende stats --json`: what this machine has given."""

    tokens_done: int = 0
    tokens_confirmed: int = 0
    tokens_in_flight: int = 0
    """In contributions that are not final yet."""
    tokens_pending: int = 0
    """Trained, or carried, and not yet in a contribution that can be listed."""
    tokens_refused: int = 0
    tokens_dropped: int = 0
    tokens_refused_by_reason: dict[str, int] = msgspec.field(default_factory=dict)
    """Adds up to `tokens_refused`."""
    tokens_dropped_by_reason: dict[str, int] = msgspec.field(default_factory=dict)
    """Adds up to `tokens_dropped`."""
    inner_steps: int = 0
    rounds_confirmed: int = 0
    rounds_refused: int = 0
    contributed_s: float = 0.0
    energy_kwh: float | None = None
    """None where the machine cannot measure it."""
    bytes_by_purpose: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)
    """purpose -> {"sent": bytes, "received": bytes}."""
    done_as_of_utc: str = ""
    confirmed_as_of_utc: str = ""
    since_utc: str = ""
    """Only what was done from there on counts, but for work that is not contributed yet: all of it
    does. Empty: everything."""


class DayTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """The network's bytes of one day (`traffic`, and `allmende stats --days N --json`: a list)."""

    day_utc: str
    """Like `2026-11-30`."""
    bytes_by_purpose: dict[str, dict[str, int]]
    """As in `Stats`."""


class RoundPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One committed round, or the genesis as round 0, as the curve shows it (`history`: a list)."""

    round_index: int
    commit_id: str
    state_hash: str
    held_out_loss: float | None
    num_contributions: int
    applied_utc: str
    own_listed: bool
    loss_stderr: float | None = None
    """Standard error of `held_out_loss`, nats per byte."""
    num_windows: int | None = None
    """That it was measured on: fewer than the RunSpec's where the machine had no time for all."""


class ContributionPoint(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one contribution of this machine (`contributions`: a list, oldest first).

    The new tokens of all contributions, and what `stats` tells as not contributed, discarded before
    a contribution, are all that was trained: each token is in one place.
    """

    contribution_id: str
    round_index: int
    """Height of the commit that it was made on."""
    tokens: int
    """All whose work it contains, those of what it carries included."""
    new_tokens: int
    """Those that nothing that it carries contains."""
    state: str
    """in_flight, pending, confirmed, refused or dropped: of this very contribution."""
    reason: str = ""
    """Why it was refused or dropped."""
    outcome: str
    """The same of its new tokens, wherever they were carried."""
    carried_by: tuple[str, ...] = ()
    """Later contributions of this machine that contain it, the oldest first."""
    listed_in_round: int | None = None
    """Height of the commit that lists it, on the chain that this machine stands on; None: none."""
    commit_id: str = ""
    """That commit."""
    made_utc: str
    state_utc: str
    """When `state` was last told."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """`allmende sample --json`: what the current shared weights write."""

    text: str
    """Without the prompt; bytes that are not UTF-8 are replaced. As the model wrote it otherwise:
    whoever shows it cleans it."""
    num_tokens: int
    state_hash: str
    round_index: int
    """Height of the commit whose weights these are."""
    seed: int
    """Gives the same text again, on this machine with these weights."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """`allmende import --json`: what was made. Its process says it, and no agent."""

    spec_file: str
    run_id: str
    """While the RunSpec is as it was written."""
    run_name: str
    state_hash: str
    num_parameters: int
    tokenizer: str
    """As in `data.tokenizer`."""
