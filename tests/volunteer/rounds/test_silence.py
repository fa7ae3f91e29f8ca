"""A member that has lost its records, but not its key, signs nothing twice."""

from __future__ import annotations

from tests.volunteer.rounds.chain_builder import ChainBuilder
from tests.volunteer.rounds.desk import FAILOVER_S, ROUND_S, Desk, only
from tests.volunteer.rounds.test_chain import grown
from volunteer.rounds import events as ev
from volunteer.rounds.machine import Machine
from volunteer.rounds.silence import ALONE_ROUNDS, STEPS_PER_ROUND, Silence
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


def silent_rounds(silence: Silence, height: int, highest_known: int, begin_s: float = 0.0) -> int:
    """Return for how many rounds it says nothing."""
    step_s = ROUND_S / STEPS_PER_ROUND
    for step in range(int(3 * ALONE_ROUNDS * STEPS_PER_ROUND)):
        if silence.may_sign(height, highest_known, begin_s + step * step_s, ROUND_S):
            return step // STEPS_PER_ROUND
    raise AssertionError("for ever")


def test_who_has_heard_nobody_stays_silent_for_long_but_not_for_ever() -> None:
    silence = Silence(is_kept=True)
    assert silent_rounds(silence, 0, 0) == ALONE_ROUNDS
    assert not silence.is_kept


def test_a_swarm_that_has_gone_silent_is_waited_for_as_long() -> None:
    silence = Silence(is_kept=True)
    assert not silence.may_sign(5, 5, 0.0, ROUND_S)
    assert not silence.may_sign(6, 6, 100 * ROUND_S, ROUND_S)
    assert silent_rounds(silence, 6, 6, begin_s=100 * ROUND_S) == ALONE_ROUNDS


def test_a_snapshot_that_remembers_what_was_sent_is_not_signed_again() -> None:
    """The trainer's folder may have survived the records."""
    chain, _, desk = forgetful_desk()
    event = ev.ContributionEncoded(
        base=chain.rules.genesis_id,
        blob_id="b" * 64,
        blob_bytes=10,
        codec="int4",
        codec_version=1,
        tokens=100,
        carries=(),
    )
    assert not only(desk.machine.handle(event, 1.0), ev.PublishRecord)
