"""What the control socket's verbs do.

Runs in: agent.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import trio

from volunteer.agent.control import Verb
from volunteer.agent.doctor_verb import make_doctor
from volunteer.agent.policy_task import PolicyTask
from volunteer.agent.sampling import Sampler
from volunteer.agent.status import StatusSource
from volunteer.agent.traffic import TrafficMeter
from volunteer.answers import Sample
from volunteer.errors import ControlError
from volunteer.messages import MAX_SEED, Generate
from volunteer.rounds.records import DENSE_MODULE
from volunteer.stats.ledger import Ledger

MAX_HISTORY = 2000
MAX_CONTRIBUTIONS = 1000
MAX_DAYS = 3660
MAX_SINCE_S = MAX_DAYS * 86400.0
MAX_PAUSE_S = 366 * 86400.0


def make_verbs(
    source: StatusSource,
    ledger: Ledger,
    policy: PolicyTask,
    traffic: TrafficMeter,
    stop: Callable[[], None],
    sampler: Sampler,
) -> Mapping[str, Verb]:
    """Return the verbs by name; each takes the request's arguments and returns its result."""

    async def status(args: Mapping[str, Any]) -> object:
        await trio.lowlevel.checkpoint()
        return source.status()

    async def peers(args: Mapping[str, Any]) -> object:
        await trio.lowlevel.checkpoint()
        return source.peers()

    async def stats(args: Mapping[str, Any]) -> object:
        policy.flush()
        await traffic.flush()
        await source.keeper.flush()
        if args.get("since_s") is None:
            kept = await trio.to_thread.run_sync(ledger.stats, None)
        else:
            since_s = _number(args, "since_s", default=0.0, least=0.0, most=MAX_SINCE_S)
            kept = await trio.to_thread.run_sync(ledger.stats_of_last, since_s)
        return source.with_steps_since_snapshot(kept)

    async def history(args: Mapping[str, Any]) -> object:
        limit = _number(args, "limit", default=200, least=1, most=MAX_HISTORY)
        run_id = source.spec.run_id
        return await trio.to_thread.run_sync(ledger.history, run_id, DENSE_MODULE, int(limit))

    async def traffic_by_day(args: Mapping[str, Any]) -> object:
        days = _number(args, "days", default=7, least=1, most=MAX_DAYS)
        await traffic.flush()
        await source.keeper.flush()
        return await trio.to_thread.run_sync(ledger.bytes_by_day, int(days))

    async def contributions(args: Mapping[str, Any]) -> object:
        limit = _number(args, "limit", default=200, least=1, most=MAX_CONTRIBUTIONS)
        await source.keeper.flush()
        run_id = source.spec.run_id
        kept = await trio.to_thread.run_sync(ledger.contributions, run_id, DENSE_MODULE, int(limit))
        return source.keeper.with_listing(kept)

    return {
        "status": status,
        "peers": peers,
        "stats": stats,
        "history": history,
        "contributions": contributions,
        "traffic": traffic_by_day,
        "sample": _make_sample(source, sampler),
        "doctor": make_doctor(source, policy),
        **_make_pauses(source, policy, stop),
    }


def _make_pauses(
    source: StatusSource, policy: PolicyTask, stop: Callable[[], None]
) -> dict[str, Verb]:
    """Return the verbs by which the owner interrupts the work."""

    async def pause(args: Mapping[str, Any]) -> object:
        for_s = None
        if args.get("for_s") is not None:
            for_s = _number(args, "for_s", default=0.0, least=1.0, most=MAX_PAUSE_S)
        was_running = policy.is_running
        if args.get("finish"):
            await policy.finish()
        else:
            await policy.pause(for_s)
        if was_running and policy.release is not None and policy.release.problem:
            raise ControlError(
                f"paused, but not all is free: {policy.release.problem}",
                hint="a process that cannot be ended goes with a reboot only",
            )
        return source.status()

    async def resume(args: Mapping[str, Any]) -> object:
        await policy.resume()
        return source.status()

    async def stop_agent(args: Mapping[str, Any]) -> object:
        if args.get("finish") and policy.is_running:
            await policy.finish(ends_agent=True)
            return {"stopping": False}
        await trio.lowlevel.checkpoint()
        stop()
        return {"stopping": True}

    return {"pause": pause, "resume": resume, "stop": stop_agent}


def _make_sample(source: StatusSource, sampler: Sampler) -> Verb:
    async def sample(args: Mapping[str, Any]) -> object:
        request = _sample_request(args)
        machine = source.driver.machine
        if machine.tip is None:
            raise ControlError(
                "there are no shared weights yet",
                hint="`allmende status` says what they wait for",
            )
        state_hash = source.driver.state_hash
        round_index = machine.known.facts[machine.tip].height
        generated = await sampler.sample(state_hash, request)
        return Sample(
            text=generated.text,
            num_tokens=generated.num_tokens,
            state_hash=state_hash,
            round_index=round_index,
            seed=request.seed,
        )

    return sample


def _sample_request(args: Mapping[str, Any]) -> Generate:
    """Return what is asked for, with a seed of chance where none is given.

    Raises:
        ControlError: an argument is not valid.
    """
    seed = secrets.randbelow(MAX_SEED + 1)
    try:
        return msgspec.convert({"seed": seed, **args, "type": "generate"}, Generate)
    except msgspec.ValidationError as error:
        refusal = ControlError(str(error), hint="see `allmende sample --help`")
        refusal.exit_code = 2
        raise refusal from error


def _number(
    args: Mapping[str, Any], name: str, *, default: float, least: float, most: float
) -> float:
    value = args.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise ControlError(
            f"{name}: {value!r} is not a number from {least:g} to {most:g}",
            hint="see `allmende --help`",
        )
    return float(value)
