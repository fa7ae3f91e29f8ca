"""Hand-written schedules against the real machine, each of which needs one rule of ROUNDS.md.

Each returns what went wrong, as a sentence; empty when the rules held.
"""

from __future__ import annotations

from tests.simulation.stage import Stage

OLD, NEW = "abc", "defgh"


def rosters_change_at_a_partition(*, is_second_change: bool = False) -> str:
    """Three members, five newcomers who outnumber them, and a partition as the roster changes.

    D is the last commit that all have. The newcomers and c go on with C, which lists them and the
    votes of b and c for D: D is certified, its parent final, and the roster grows to all eight. a
    has heard nobody and commits C' on D with its own vote only, so that there the old roster holds;
    b hears C' and not C, and what it has said about D reaches only the newcomers. Now a and b are
    most of the old roster, and the newcomers are most of the new one: were the current roster alone
    the quorum, both sides would go final. With both (rules 7 and 10) the newcomers need one more of
    abc.

    Args:
        is_second_change: do so one change later, when the grown roster becomes the previous one:
            that needs the current roster in the quorum as well.
    """
    before = (frozenset(OLD), frozenset(OLD + NEW if is_second_change else OLD))
    after = (before[1], frozenset(OLD + NEW))
    stage = Stage(OLD + NEW)
    stage.rounds(OLD, 6)
    stage.share(OLD + NEW)
    if is_second_change:
        stage.rounds(NEW + OLD, 2)
    said = stage.contribute(OLD + NEW)
    stage.tell([said[name] for name in "bc" + NEW], "c" + NEW)
    grown = stage.propose("d")
    stage.tell([grown], "c" + NEW)
    assert stage.tip("d").commit_id == grown
    assert stage.tip("d").rosters == after
    rival = stage.propose("a")
    assert stage.tip("a").rosters == before
    stage.tell([said["a"], rival], "b")
    assert stage.tip("b").commit_id == rival
    for _ in range(2):
        stage.go_on("ab")
    for _ in range(2):
        stage.go_on(NEW)
    return _conflicts(stage)


def memory_errs_after_a_vote() -> str:
    """A voter whose memory errs forgets what its votes have made final.

    a and b vote for B and for its child D; b sees B final. c has heard none of that and has gone on
    alone. a's machine computes the state of B again, gets a wrong hash and refuses B; then it hears
    c. Its choice of the tip no longer knows that B is certified. Its lock does (rule 21), since
    that is recomputed from its votes and from headers: it goes with c and does not vote. Without
    the lock, a and c make a rival of B final.
    """
    stage = Stage("abc")
    stage.rounds("abc", 6)
    said = stage.contribute("abc")
    stage.tell([said["a"]], "b")
    first = stage.propose("b")
    stage.tell([said["b"], first], "a")
    second = stage.go_on("ab")
    said = stage.contribute("ab")
    stage.tell([said["a"]], "b")
    while stage.tip("b").commit_id == second:
        stage.tick("b")
    assert stage.tip("b").final_id == first
    for _ in range(3):
        stage.go_on("c")
    stage.actors["a"].misjudge(first)
    stage.tell(list(stage.actors["c"].disk), "a")
    assert stage.tip("a").commit_id == stage.tip("c").commit_id
    for _ in range(3):
        stage.tell(stage.contribute("a").values(), "c")
        base = stage.tip("c").commit_id
        while stage.tip("c").commit_id == base:
            stage.tick("c")
        stage.tell(list(stage.actors["c"].disk), "a")
    return _conflicts(stage)


def halves_of_unequal_speed_meet(faster: str = "ab", slower: str = "cd") -> str:
    """Four members go on in two halves beyond the expiry, one half faster, and meet again.

    If the slower half's branch is the one that is chosen, the members of the faster half have
    locks above all that is certified on it, and are needed for the quorum as soon as they are
    listed again. If those locks bound them, nothing would ever become final again.
    """
    stage = Stage(faster + slower)
    stage.rounds(faster + slower, 6)
    stage.rounds(faster, 16)
    stage.rounds(slower, 12)
    assert stage.tip(faster[0]).resets == stage.tip(slower[0]).resets == 1
    stage.share(faster + slower)
    stage.rounds(faster + slower, 16)
    tip = stage.tip(faster[0])
    lag = tip.height - tip.final_height
    return "" if lag <= 3 else f"nothing has become final for {lag} heights"


def _conflicts(stage: Stage) -> str:
    conflicts = stage.conflicting_finals()
    alarms = [a.me for a in stage.actors.values() if a.alarm is not None]
    if conflicts:
        return f"I2: {len(conflicts)} pairs of conflicting finals"
    return f"alarm of {alarms}" if alarms else ""
