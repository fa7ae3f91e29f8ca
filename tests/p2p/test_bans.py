"""Rules without a network: buckets, points, bans, and places for sockets."""

from __future__ import annotations

import logging

import pytest

from p2p.admission import (
    MAX_HALF_OPEN,
    NOT_LET_IN,
    TOO_MANY,
    Admission,
    Ticket,
)
from p2p.bans import MAX_BAN_S, MAX_TIMED_BANS, BanList
from p2p.conduct import POINT_LIMIT, POINTS_FADE_PER_S, WARNINGS_BURST, Conduct, Misdeed
from p2p.seldom import LOG_AGAIN_S
from p2p.swarm_types import Ban
from p2p.token_buckets import MAX_KEYS, TokenBuckets


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_gives_its_burst_then_its_rate() -> None:
    buckets = TokenBuckets(per_s=2.0, burst=10.0)
    assert buckets.take("a", 0.0, 8.0) == 0.0
    assert buckets.take("a", 0.0, 5.0) == 3.0
    assert buckets.take("b", 0.0, 10.0) == 0.0
    assert buckets.take("a", 1.0, 3.0) == 1.0
    assert buckets.take("a", 1000.0, 11.0) == 1.0
    buckets.forget("a")
    assert buckets.take("a", 1000.0, 10.0) == 0.0


def test_buckets_are_bounded_in_number() -> None:
    buckets = TokenBuckets(per_s=0.0, burst=1.0)
    assert buckets.take("first", 0.0) == 0.0
    for number in range(MAX_KEYS):
        buckets.take(f"{number}", 0.0)
    assert buckets.take("first", 0.0) == 0.0  # forgotten, to its advantage
    assert buckets.take(f"{MAX_KEYS - 1}", 0.0) == 1.0


def test_points_add_up_fade_and_end_in_a_refusal() -> None:
    refused: list[tuple[str, str]] = []
    conduct = Conduct(lambda peer, reason: refused.append((peer, reason)))
    for second in range(1000):
        conduct.note("slow", Misdeed.GOSSIP_FLOOD, float(second), POINTS_FADE_PER_S)
    assert refused == []
    conduct.note("fast", Misdeed.GOSSIP_FLOOD, 0.0, POINT_LIMIT - 1)
    assert refused == []
    conduct.note("fast", Misdeed.MALFORMED, 1.0)
    assert refused == [("fast", Misdeed.MALFORMED.sentence)]
    conduct.note("fast", Misdeed.MALFORMED, 1.0)  # counts anew
    assert len(refused) == 1


def test_each_misdeed_is_logged_once_for_each_peer(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="p2p.conduct")
    conduct = Conduct(lambda _peer, _reason: None)
    for _ in range(3):
        conduct.note("a", Misdeed.MALFORMED, 0.0)
        conduct.note("a", Misdeed.TOO_OFTEN, 0.0)
        conduct.note("b", Misdeed.MALFORMED, 0.0)
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.WARNING] * 3 + [logging.DEBUG] * 6
    for number in range(1000):  # as many peer ids as anybody likes
        conduct.note(f"{number}", Misdeed.MALFORMED, 1.0)
    levels = [record.levelno for record in caplog.records]
    assert levels.count(logging.WARNING) <= WARNINGS_BURST + 1


def test_timed_bans_end_and_double() -> None:
    clock = Clock()
    bans = BanList({}, ban_s=100.0, utc_now=clock)
    assert bans.ban_again("a", "floods") == Ban("floods", clock.now + 100.0)
    assert bans.is_banned("a")
    clock.now += 100.0
    assert not bans.is_banned("a")
    assert bans.current() == {}
    assert bans.ban_again("a", "floods").until_utc == clock.now + 200.0
    for _ in range(40):
        bans.ban_again("a", "floods")
    assert bans.current()["a"].until_utc == clock.now + MAX_BAN_S


def test_a_ban_is_never_shortened() -> None:
    clock = Clock()
    bans = BanList({"a": Ban("proof", None)}, ban_s=100.0, utc_now=clock)
    assert bans.ban_again("a", "floods") == Ban("proof", None)
    assert bans.ban("b", "long", ban_s=500.0) == bans.ban("b", "short", ban_s=5.0)
    assert bans.ban("b", "proof", ban_s=None) == Ban("proof", None)
    assert set(bans.current()) == {"a", "b"}


def test_what_was_kept_is_taken_up_again() -> None:
    clock = Clock()
    kept = {"good": Ban("x", None), "past": Ban("y", clock.now - 1), "now": Ban("z", clock.now + 1)}
    bans = BanList(kept, ban_s=100.0, utc_now=clock)
    assert [bans.is_banned(peer) for peer in ("good", "past", "now")] == [True, False, True]
    assert set(bans.current()) == {"good", "now"}


def test_timed_bans_are_bounded_and_bans_for_good_stay() -> None:
    clock = Clock()
    bans = BanList({"good": Ban("x", None)}, ban_s=100.0, utc_now=clock)
    for number in range(MAX_TIMED_BANS + 5):
        clock.now += 0.001
        bans.ban_again(f"{number}", "floods")
    assert len(bans.current()) == MAX_TIMED_BANS + 1
    assert bans.is_banned("good")
    assert not bans.is_banned("0")


def nothing() -> None:
    pass


def admit(admission: Admission, host: str, aborted: list[str]) -> Ticket:
    ticket = admission.enter(host, lambda: aborted.append(host))
    assert ticket is not None
    return ticket


def test_places_are_counted_by_address() -> None:
    admission = Admission(max_open=10, max_per_ip=2, max_from_loopback=3)
    tickets = [admit(admission, "192.0.2.1", []) for _ in range(2)]
    assert admission.enter("192.0.2.1", nothing) is None
    assert admission.enter("::ffff:192.0.2.1", nothing) is None
    assert admission.enter("192.0.2.2", nothing) is not None
    for host in ("2001:db8::1", "2001:db8::2"):
        assert admission.enter(host, nothing) is not None
    assert admission.enter("2001:db8::3", nothing) is None  # the same /64
    assert admission.enter("2001:db8:0:1::3", nothing) is not None
    for _ in range(3):
        assert admission.enter("127.0.0.1", nothing) is not None
    assert admission.enter("127.0.0.1", nothing) is None
    admission.leave(tickets[0])
    admission.leave(tickets[0])
    assert admission.enter("192.0.2.1", nothing) is not None
    assert admission.enter("192.0.2.1", nothing) is None


def test_silent_sockets_push_out_one_another() -> None:
    admission = Admission(max_open=4, max_per_ip=40, max_from_loopback=1000)
    aborted: list[str] = []
    honest = admit(admission, "192.0.2.1", aborted)
    for _ in range(3 * MAX_HALF_OPEN):
        admit(admission, "127.0.0.1", aborted)
    assert admission.num_half_open == MAX_HALF_OPEN
    assert set(aborted) == {"127.0.0.1"}
    assert admission.open(honest)
    assert (admission.num_open, admission.num_half_open) == (1, MAX_HALF_OPEN - 1)


def test_open_places_run_out() -> None:
    admission = Admission(max_open=2, max_per_ip=40, max_from_loopback=1000)
    tickets = [admit(admission, "127.0.0.1", []) for _ in range(3)]
    assert [admission.open(ticket) for ticket in tickets] == [True, True, False]
    for ticket in tickets:
        admission.leave(ticket)
    assert (admission.num_open, admission.num_half_open) == (0, 0)
    assert not admission.open(tickets[0])  # it is gone


def test_what_strangers_do_is_logged_once_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    admission = Admission(max_open=9, max_per_ip=1, max_from_loopback=9, clock=clock)
    with caplog.at_level(logging.INFO, logger="p2p.admission"):
        for number in range(50):
            ticket = admission.enter(f"10.0.0.{number}", lambda: None)
            assert ticket is not None
            assert admission.enter(f"10.0.0.{number}", lambda: None) is None
            admission.leave(ticket)
        assert [record.getMessage() for record in caplog.records] == [
            f"refused address=10.0.0.0 others=0: {TOO_MANY}",
            f"refused address=10.0.0.0 others=0: {NOT_LET_IN}",
        ]
        caplog.clear()
        clock.now += LOG_AGAIN_S
        admission.enter("10.0.0.7", lambda: None)
        admission.enter("10.0.0.7", lambda: None)
        friend = admission.enter("10.0.0.8", lambda: None)
        assert friend is not None
        assert admission.open(friend)
        admission.leave(friend)
    (again,) = (record.getMessage() for record in caplog.records)
    assert again == f"refused address=10.0.0.7 others=49: {TOO_MANY}"
