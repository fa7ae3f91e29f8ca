"""What is said about each state, and that nothing is claimed that is not known."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from tests.fakes.fake_agent import make_history, make_peers, make_stats, make_status
from tests.tui.conftest import NOW
from tui import view_state
from tui.view_state import Link, Snapshot
from tui.wording import NOT_YET
from volunteer.answers import Stats, Status

BARE = Status(state="starting", reason="Reading the checkpoint.", resumes_when="")


def test_before_the_first_status_the_headline_is_connecting() -> None:
    head = view_state.headline(Snapshot())
    assert (head.title, head.level) == ("Connecting", "busy")


@pytest.mark.parametrize(
    ("state", "title", "level", "ends"),
    [
        ("contributing", "Contributing", "good", "It goes on when"),
        ("paused", "Paused", "rest", "It resumes when"),
        ("waiting", "Waiting", "rest", "It resumes when"),
        ("starting", "Starting", "busy", "It contributes when"),
        ("catching_up", "Catching up", "busy", "It contributes when"),
        ("stopped", "Stopped", "rest", "It goes on when"),
        ("levitating", "levitating", "busy", "It goes on when"),
    ],
)
def test_each_state_has_its_words(state: str, title: str, level: str, ends: str) -> None:
    status = make_status(state=state, reason="Because.", resumes_when="noon strikes")
    head = view_state.headline(Snapshot(link=Link.LIVE, status=status))
    assert (head.title, head.reason, head.ends, head.level) == (
        title,
        "Because.",
        f"{ends} noon strikes.",
        level,
    )


@pytest.mark.parametrize(
    ("link", "title"),
    [
        (Link.STARTING, "Starting the agent"),
        (Link.SILENT, "No answer"),
        (Link.GONE, "Not running"),
        (Link.FAULTY, "Not understood"),
    ],
)
def test_a_broken_link_hides_the_last_known_state(link: Link, title: str) -> None:
    snapshot = Snapshot(link=link, note="Why.", status=make_status())
    head = view_state.headline(snapshot)
    assert (head.title, head.reason) == (title, "Why.")
    assert not snapshot.is_current


def test_no_agent_says_so_and_how_to_start_it() -> None:
    head = view_state.headline(Snapshot(link=Link.GONE))
    assert "does not contribute" in head.reason
    assert head.ends == "Press s to start it."
    flags = ("--listen", "/ip4/0.0.0.0/tcp/4001", "--device", "a b\x1b")
    head = view_state.headline(Snapshot(link=Link.GONE, flags=flags))
    assert head.ends == (
        "Press s to start it as it ran: --listen /ip4/0.0.0.0/tcp/4001 --device 'a b '"
    )


def test_with_an_alarm_no_state_looks_good() -> None:
    head = view_state.state_headline(make_status(alarm="two commits contradict each other"))
    assert head.reason == "Nobody uses this machine. Alarm: Two commits contradict each other."
    assert head.level == "bad"


def test_control_characters_of_a_reason_are_not_shown() -> None:
    head = view_state.state_headline(make_status(reason="a\x1b[2Jb\u202ec\nd"))
    assert head.reason == "A [2Jb c d."


def test_a_state_without_a_reason_is_still_a_sentence() -> None:
    assert view_state.state_sentence(make_status(reason="")) == "Contributing"


def test_the_sentence_has_state_reason_and_end() -> None:
    status = make_status(state="paused", reason="You paused it.", resumes_when="you resume")
    assert view_state.state_sentence(status) == "Paused: You paused it. It resumes when you resume."
    assert view_state.state_sentence(make_status()) == "Contributing: Nobody uses this machine."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Training on cuda:0, inner step 3100; 527k tokens not sent yet."),
        ({"device": ""}, "Training on the device, inner step 3100"),
        ({"trainer_pid": None}, "The trainer is being started."),
        ({"state": "catching_up"}, "Getting the swarm's shared weights"),
        (
            {"state": "paused"},
            "The trainer (process 4243) still runs; it saves its work, then ends.",
        ),
        ({"state": "waiting"}, "The trainer (process 4243) still runs."),
        ({"state": "paused", "trainer_pid": None}, "527k tokens are kept here"),
        (
            {"state": "waiting", "trainer_pid": None, "tokens_since_contribution": 0},
            "No trainer runs.",
        ),
    ],
)
def test_what_happens_now(changes: dict[str, object], words: str) -> None:
    assert words in view_state.activity(make_status(**changes))


def test_while_starting_only_the_reason_speaks() -> None:
    assert view_state.activity(BARE) == ""


@pytest.mark.parametrize(
    ("elapsed_s", "round_s", "fraction", "text"),
    [
        (250.0, 600.0, 250 / 600, "4:10 of 10:00"),
        (0.0, 600.0, 0.0, "0:00 of 10:00"),
        (-5.0, 600.0, 0.0, "0:00 of 10:00"),
        (612.0, 600.0, 1.0, "10:12 of 10:00, closing"),
        (5.0, 0.0, None, NOT_YET),
    ],
)
def test_round_progress(
    elapsed_s: float, round_s: float, fraction: float | None, text: str
) -> None:
    status = make_status(round_elapsed_s=elapsed_s, round_s=round_s)
    progress = view_state.round_progress(status)
    assert (progress.label, progress.fraction, progress.text) == ("Round 12", fraction, text)


def test_speed_and_loss() -> None:
    assert view_state.speed_rows(make_status(num_peers=1)) == (
        ("Held-out loss", "1.4023 nats/byte"),
        ("Train loss", "1.3871 nats/byte"),
        ("This machine", "12.3k tokens/s"),
        ("Swarm", "45.1k tokens/s, 1 peer"),
    )


def test_both_losses_are_in_one_unit_as_soon_as_that_can_be_known() -> None:
    known = make_status(held_out_loss=1.25, held_out_stderr=0.01, train_loss=6.0)
    wordy = msgspec.structs.replace(known, bytes_per_token=4.0)
    assert view_state.speed_rows(wordy)[:2] == (
        ("Held-out loss", "1.2500 \N{PLUS-MINUS SIGN} 0.0100 nats/byte"),
        ("Train loss", "1.5000 nats/byte"),
    )
    young = msgspec.structs.replace(known, held_out_loss=None, bytes_per_token=None)
    assert view_state.speed_rows(young)[:2] == (
        ("Held-out loss", NOT_YET),
        ("Train loss", "6.0000 nats/token"),
    )


def test_what_of_the_data_is_left_out_is_told() -> None:
    lines = view_state.status_lines(make_status(data_note="No folder is set."), NOW)
    assert "  Left out       No folder is set." in lines
    assert not any("Left out" in line for line in view_state.status_lines(make_status(), NOW))


def test_what_is_not_known_is_not_yet() -> None:
    assert view_state.speed_rows(BARE) == (
        ("Held-out loss", NOT_YET),
        ("Train loss", NOT_YET),
        ("This machine", NOT_YET),
        ("Swarm", f"{NOT_YET}, no peers"),
    )


def test_a_resting_machine_has_no_speed() -> None:
    rows = dict(view_state.speed_rows(make_status(state="paused", trainer_pid=None)))
    assert rows["This machine"] == "none while it rests"


def test_totals_carry_their_as_of_times() -> None:
    snapshot = Snapshot(status=make_status(), status_at=NOW, stats=make_stats())
    assert view_state.total_rows(snapshot, NOW, is_brief=False) == (
        ("Done here", "12.4M tokens, as of 14:03:22"),
        ("Confirmed", "11.9M tokens by the swarm, as of 13:57:10"),
    )
    assert view_state.total_rows(snapshot, NOW, is_brief=True) == (
        ("Done here", "12.4M tokens, 14:03:22"),
        ("Confirmed", "11.9M tokens, 13:57:10"),
    )


def test_totals_without_stats_or_status() -> None:
    assert view_state.total_rows(Snapshot(), NOW, is_brief=False) == ()
    snapshot = Snapshot(status=make_status(), status_at=NOW)
    assert view_state.total_rows(snapshot, NOW, is_brief=False) == (
        ("Done here", "12.4M tokens, as of 14:03:22"),
        ("Confirmed", "11.9M tokens by the swarm, as of 14:03:22"),
    )
    timeless = view_state.total_rows(Snapshot(status=make_status()), NOW, is_brief=True)
    assert timeless[0] == ("Done here", f"12.4M tokens, {NOT_YET}")
    none = view_state.total_rows(Snapshot(status=BARE), NOW, is_brief=False)
    assert none[1] == ("Confirmed", NOT_YET)


def test_the_ledger_counts_while_the_trainer_has_not_spoken() -> None:
    stats = make_stats(done_as_of_utc="2026-11-30T13:00:00Z")
    snapshot = Snapshot(status=BARE, status_at=NOW, stats=stats)
    assert view_state.total_rows(snapshot, NOW, is_brief=True) == (
        ("Done here", "12.4M tokens, 13:00:00"),
        ("Confirmed", "11.9M tokens, 13:57:10"),
    )


def test_only_old_values_carry_an_as_of() -> None:
    live = Snapshot(link=Link.LIVE, status=make_status(), status_at=NOW)
    assert view_state.as_of(live, NOW) == ""
    assert view_state.as_of(with_link(live, Link.GONE), NOW) == "as of 14:03:22"
    assert view_state.as_of(Snapshot(link=Link.GONE), NOW) == ""


def with_link(snapshot: Snapshot, link: Link) -> Snapshot:
    return Snapshot(link=link, status=snapshot.status, status_at=snapshot.status_at)


def test_loss_points_are_in_order_and_one_a_round() -> None:
    history = make_history(7)
    later = msgspec.structs.replace(history[2], held_out_loss=9.0)
    points = view_state.loss_points([*reversed(history), later])
    assert [index for index, _ in points] == list(range(7))
    assert dict(points)[2] == 9.0
    assert dict(points)[5] is None
    assert view_state.loss_points(None) == ()


def test_peer_table_judges_weights_only_where_both_are_known() -> None:
    peers = make_peers(3)
    peers[2] = msgspec.structs.replace(
        peers[2], state_hash=None, round_index=None, last_heard_s=None
    )
    table = view_state.peer_table(peers, own_state=make_status().state_hash)
    assert [row[5] for row in table] == ["Weights", "same", "other", NOT_YET]
    assert table[3][2:5] == (NOT_YET, NOT_YET, NOT_YET)
    assert table[3][6] == NOT_YET
    assert {row[5] for row in view_state.peer_table(peers)[1:]} == {NOT_YET}


def test_columns_that_do_not_fit_are_left_out() -> None:
    table = (("ab", "c", "d"), ("x", "yyy", "z"))
    assert view_state.align(table, 80) == ("ab  c    d", "x   yyy  z")
    assert view_state.align(table, 8) == ("ab  c", "x   yyy")
    assert view_state.align(table, 1) == ("a", "x")
    assert view_state.align((), 80) == ()


def test_stats_rows() -> None:
    rows = dict(view_state.stats_rows(make_stats(), NOW))
    assert rows["Confirmed by the swarm"] == "11.9M tokens, as of 13:57:10"
    assert rows["Energy"] == "0.42 kWh"
    empty = dict(view_state.stats_rows(Stats(), NOW))
    assert empty["Done here"] == NOT_YET
    assert empty["Energy"] == "not measured here"


def test_traffic_by_purpose() -> None:
    stats = make_stats(bytes_by_purpose={"gossip": {"sent": 81_000}, "blob": {"received": 12}})
    assert view_state.traffic_table(stats) == (
        ("Traffic", "Sent", "Received"),
        ("blob", "0 B", "12 B"),
        ("gossip", "81.0 kB", "0 B"),
    )


def test_status_lines_of_a_healthy_and_of_a_new_agent() -> None:
    healthy = view_state.status_lines(make_status(), NOW)
    assert healthy[0] == "Contributing: Nobody uses this machine."
    assert "  Confirmed      11.9M tokens, last 6 min 12 s ago" in healthy
    fresh = view_state.status_lines(BARE, NOW)
    assert f"  Confirmed      {NOT_YET}" in fresh
    assert not [line for line in fresh if line.startswith("  Now")]


def test_the_closing_note_says_only_what_is_known() -> None:
    live = Snapshot(link=Link.LIVE, status=make_status())
    assert "goes on in the background" in view_state.closing_note(live)
    assert "allmende stop" in view_state.closing_note(live)
    gone = Snapshot(link=Link.GONE, status=make_status())
    assert "does not contribute" in view_state.closing_note(gone)
    assert "allmende status" in view_state.closing_note(Snapshot())


def test_as_of_of_another_day_has_its_date() -> None:
    old = datetime(2026, 11, 28, 9, 0, tzinfo=UTC)
    snapshot = Snapshot(link=Link.GONE, status=make_status(), status_at=old)
    assert view_state.as_of(snapshot, NOW) == "as of 28 Nov 09:00"
