"""A member that has lost its records, but not its key, signs nothing twice."""

from __future__ import annotations

from tests.volunteer.rounds.chain_builder import ChainBuilder
from tests.volunteer.rounds.desk import FAILOVER_S, ROUND_S, Desk, only
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds import events as ev
from volunteer.rounds.machine import Machine
from volunteer.rounds.silence import Silence
from volunteer.rounds.turn import Timing


def forgetful_desk() -> tuple[ChainBuilder, str, Desk]:
    chain, tip = grown()
    desk = Desk(chain, "a")
    timing = Timing(round_s=ROUND_S, grace_s=10.0, failover_s=FAILOVER_S)
    desk.machine = Machine(chain.rules, timing, "a", has_lost_records=True)
    desk.stand_on(tip)
    return chain, tip, desk


def wait_rounds(desk: Desk, rounds: float) -> list[ev.Action]:
    done = []
    for _ in range(int(20 * rounds)):
        done += desk.wait(ROUND_S / 20)
    return done


def test_it_signs_nothing_on_what_was_known_when_it_began_to_listen() -> None:
    _, _, desk = forgetful_desk()
    done = wait_rounds(desk, 20)
    assert not only(done, ev.Encode)
    assert not only(done, ev.ComputeProposal)
    assert not only(done, ev.PublishRecord)


def test_it_signs_again_once_the_others_have_gone_on() -> None:
    chain, tip, desk = forgetful_desk()
    wait_rounds(desk, 2.5)
    one_more = chain.rounds(tip, "bc", 1)[-1]
    desk.learn(verified=(one_more,))
    assert desk.machine.tip == one_more
    assert not only(wait_rounds(desk, 2), ev.Encode)
    another = chain.rounds(one_more, "bc", 1)[-1]
    desk.learn(verified=(another,))
    assert only(wait_rounds(desk, 2), ev.Encode)
    assert desk.contribute(another).vote


def test_who_has_lost_nothing_is_not_silent() -> None:
    _, _, desk = forgetful_desk()
    assert not only(wait_rounds(desk, 2), ev.Encode)
    chain, tip = grown()
    other = Desk(chain, "a")
    other.stand_on(tip)
    assert only(wait_rounds(other, 2), ev.Encode)


def test_a_clock_that_jumps_does_not_end_the_listening() -> None:
    silence = Silence(is_kept=True)
    assert not silence.may_sign(3, 3, now_s=0.0, round_s=ROUND_S)
    assert not silence.may_sign(9, 9, now_s=50 * ROUND_S, round_s=ROUND_S)
    assert not silence.may_sign(10, 10, now_s=50 * ROUND_S + 1.0, round_s=ROUND_S)


def test_who_has_heard_nobody_stays_silent() -> None:
    silence = Silence(is_kept=True)
    assert not any(silence.may_sign(0, 0, now_s=10.0 * i, round_s=ROUND_S) for i in range(1000))
