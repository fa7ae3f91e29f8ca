"""The peers' clocks: what is compared, how exact it is, and what a peer can do to it."""

from __future__ import annotations

import time

import pytest

from p2p.clocks import MAX_KNOWN, TELL_FOR_S, Clocks
from p2p.hello import HELLOS_BURST, encode_hello
from p2p.swarm import Swarm
from tests.p2p.support import swarm, trio_test, until

UTC_S = 1_796_047_402.0


class Clock:
    """Our own clock, which can be set."""

    def __init__(self) -> None:
        self.utc_s = UTC_S

    def __call__(self) -> float:
        return self.utc_s


def test_a_clock_that_is_right_is_ahead_by_no_more_than_the_error() -> None:
    clock = Clock()
    clocks = Clocks(clock)
    for fraction in (0.0, 0.3, 0.999):
        clock.utc_s = UTC_S + fraction
        clocks.note("a", clocks.own_utc_s(), asked_at_s=9.9, answered_at_s=10.1)
        (view,) = clocks.views(10.0)
        assert view.error_s == pytest.approx(0.6)
        assert abs(view.ahead_s) <= view.error_s


def test_a_clock_that_is_set_meanwhile_is_compared_as_it_is_now() -> None:
    clock = Clock()
    clocks = Clocks(clock)
    clocks.note("a", int(UTC_S) + 3600, asked_at_s=10.0, answered_at_s=10.0)
    assert clocks.views(10.0)[0].ahead_s == pytest.approx(3600.5)
    clock.utc_s += 86400 + 50
    assert clocks.views(60.0)[0].ahead_s == pytest.approx(3600.5 - 86400)


def test_what_was_told_long_ago_is_not_told_again_and_memory_is_bounded() -> None:
    clocks = Clocks(Clock())
    for number in range(MAX_KNOWN + 3):
        clocks.note(f"p{number}", 2**64 - 1, asked_at_s=0.0, answered_at_s=1.0)
    assert len(clocks.views(1.0)) == MAX_KNOWN
    assert "p0" not in {view.peer_id for view in clocks.views(1.0)}, "the oldest went"
    assert clocks.views(1.0 + TELL_FOR_S + 0.1) == ()


def test_a_clock_before_1970_is_told_as_1970() -> None:
    assert Clocks(lambda: -5.0).own_utc_s() == 0


def set_clock(one: Swarm, ahead_s: float) -> None:
    one._hellos.clocks._utc_s = lambda: time.time() + ahead_s


@pytest.mark.slow
@pytest.mark.system
@trio_test
async def test_two_learn_how_far_their_clocks_are_apart_and_who_dialled_whom() -> None:
    async with swarm() as one:
        set_clock(one, 7200.0)
        async with swarm(*one.listen_addrs) as other:
            await until(lambda: other.peers())
            (view,) = await other.compare_clocks()
            assert view.peer_id == one.peer_id
            assert view.ahead_s == pytest.approx(7200.0, abs=view.error_s)
            await until(lambda: one.peers())
            (back,) = await one.compare_clocks()
            assert back.ahead_s == pytest.approx(-7200.0, abs=back.error_s)
            assert one.statistics().dialled_us_by_scope == {"loopback": 1}
            assert other.statistics().dialled_us_by_scope == {}


@pytest.mark.slow
@pytest.mark.system
@trio_test
@pytest.mark.parametrize("says_it", [True, False], ids=["1.1", "1.0"])
async def test_comparing_again_and_again_asks_nobody_too_often(says_it: bool) -> None:
    async with swarm() as one, swarm(*one.listen_addrs) as other:
        if not says_it:
            one._hellos._say = lambda: encode_hello(one._hellos._own)  # type: ignore[method-assign]
        await until(lambda: other.peers())
        for _ in range(2 * int(HELLOS_BURST)):
            assert len(await other.compare_clocks()) == says_it
        assert one.statistics().misdeeds == 0
