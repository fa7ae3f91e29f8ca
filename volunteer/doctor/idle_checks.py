"""Whether the machine is in use, source by source, and what follows from it.

Runs in: the command line. Where an agent runs, it is asked what its own sensors say: they decide,
and may see less than ours. Where none does, sensors of our own look for some seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from volunteer.config import Config
from volunteer.doctor.check import Check, Level
from volunteer.doctor.facts import AgentFacts, SourceLine
from volunteer.locations import Locations
from volunteer.policy.idle import Decision, IdleState, decide
from volunteer.policy.report import SourceReport
from volunteer.policy.sensors.machine import MachineSensors
from volunteer.policy.veto import Cause
from volunteer.policy.wishes import idle_config

LOOK_DEADLINE_S = 5.0
"""For all sensors together: how much others use the CPU takes two readings, 2 s apart."""
_UNKNOWN_FIX = "allmende config set headless true"


def idle_checks(
    sources: Iterable[SourceReport | SourceLine], decision: Check, *, is_unknown: bool
) -> list[Check]:
    """Return the decision, and a line for every source.

    Args:
        sources: what each said.
        decision: what follows, as `agent_decision` or `own_decision` return it.
        is_unknown: whether nobody can tell if the machine is in use.
    """
    return [decision, *(_source(source, is_unknown=is_unknown) for source in sources)]


def _source(source: SourceReport | SourceLine, *, is_unknown: bool) -> Check:
    level: Level = "well"
    if not source.is_well:
        # One that fails while others tell is no harm, unless there is a remedy.
        level = "wrong" if is_unknown or source.fix else "note"
    return Check(
        area="idle",
        name=source.name,
        level=level,
        value=source.value,
        meaning=source.meaning,
        fix=source.fix,
    )


def agent_decision(facts: AgentFacts) -> Check:
    """Return what the running agent has decided."""
    ends = f"; it resumes when {facts.resumes_when}" if facts.resumes_when else ""
    return Check(
        area="idle",
        name="agent",
        level="wrong" if facts.is_idle_unknown else "well",
        value=facts.state.replace("_", " "),
        meaning=f"{facts.reason.rstrip('.')}{ends}",
        fix=_UNKNOWN_FIX if facts.is_idle_unknown else "",
    )


def own_decision(decision: Decision, *, is_agent_silent: bool = False) -> Check:
    """Return what an agent would decide now, at its start.

    Args:
        decision: of our own sensors.
        is_agent_silent: whether one runs that does not answer.
    """
    why = "the agent does not answer" if is_agent_silent else "no agent runs"
    is_unknown = decision.cause is Cause.UNKNOWN
    ends = f"; it would go on when {decision.resumes_when}" if decision.resumes_when else ""
    return Check(
        area="idle",
        name="now",
        level="wrong" if is_unknown else "well",
        value="it would contribute" if decision.may_contribute else "it would wait",
        meaning=f"{decision.reason}{ends} ({why}; this is what one would do)",
        fix=_UNKNOWN_FIX if is_unknown else "",
    )


def look(
    config: Config,
    locations: Locations,
    client_pid: int,
    make_sensors: Callable[
        [Config, Locations, Callable[[], None]], MachineSensors
    ] = MachineSensors,
    deadline_s: float = LOOK_DEADLINE_S,
) -> tuple[list[SourceReport], Decision]:
    """Look with sensors of our own.

    Args:
        config: the owner's wishes.
        locations: whose disk and settings are looked at.
        client_pid: who asks: what is typed in its terminal is for us.
        make_sensors: makes the sensors.
        deadline_s: for everything; who has not told by then is unknown.
    """
    news = threading.Event()
    sensors = make_sensors(config, locations, news.set)
    until_s = time.monotonic() + deadline_s
    sensors.start()
    try:
        sensors.note_client(client_pid)
        sensors.wait_told(deadline_s / 2)
        while sensors.read(time.monotonic()).others_cpu_fraction is None:
            left_s = until_s - time.monotonic()
            if left_s <= 0.0 or not news.wait(left_s):
                break
            news.clear()
        signals = sensors.read(time.monotonic())
        wishes = idle_config(sensors.config(), is_idle_ignored=False)
        _, decision = decide(IdleState(), signals, wishes, time.monotonic())
        return sensors.reports(), decision
    finally:
        sensors.stop()
