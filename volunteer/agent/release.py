"""What a pause gives back: the processes are gone with all that they started, GPU memory is free.

Runs in: agent. Not taken on trust: the family of the trainer and the aggregator is noted before
they are told to end and looked for afterwards, and the driver is asked for the memory again. What
is still there is ended; what cannot be ended is named.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

import psutil
import trio

from volunteer.agent.clock import now_s
from volunteer.answers import Release
from volunteer.policy.sensors.load import family_of
from volunteer.policy.sensors.nvidia import GpuMemory, described
from volunteer.policy.sensors.watcher import SensorError

log = logging.getLogger(__name__)
STOP_DEADLINE_S = 4.5
"""For the children to end; the trainer is killed well before, so more means that it cannot be."""
GONE_DEADLINE_S = 0.4
"""For what they started to end by itself, and again after it was killed."""
DRIVER_DEADLINE_S = 1.0
"""For the driver's answer, and for the memory to come back after the process has ended."""
LOOK_EVERY_S = 0.02


class Releaser:
    """Ends the children and sees to it that what they held is free."""

    def __init__(self, read_memory: Callable[[], Sequence[GpuMemory]] | None) -> None:
        """Prepare.

        Args:
            read_memory: asks the driver, in a thread; None where no GPU of a known maker is used.
        """
        self._read_memory = read_memory

    async def release(
        self, pids: Iterable[int], stop: Callable[[], Awaitable[None]], *, is_on_gpu: bool
    ) -> Release:
        """Have `stop` end the processes `pids`, and verify that they and their memory are gone.

        Args:
            pids: of children that run.
            stop: returns when they have ended.
            is_on_gpu: whether one of them has trained on a GPU; others' memory is none of ours.
        """
        begun_at_s = now_s()
        family = _find_family(pids)
        before: list[GpuMemory] = []
        async with trio.open_nursery() as nursery:
            if is_on_gpu:
                nursery.start_soon(self._note_memory, before)
            with trio.move_on_after(STOP_DEADLINE_S):
                await stop()
        left = await _end_rest(family)
        own_pids = frozenset(process.pid for process in family)
        freed_bytes, holders = await self._freed(before, own_pids)
        return Release(
            after_s=now_s() - begun_at_s,
            num_processes=len(family),
            gpu_freed_bytes=freed_bytes,
            problem=_problem(left, holders),
        )

    async def _note_memory(self, noted: list[GpuMemory]) -> None:
        """Ask the driver; nothing is noted where it does not answer in time."""
        if self._read_memory is None:
            return
        with trio.move_on_after(DRIVER_DEADLINE_S):
            with contextlib.suppress(SensorError):
                noted += await trio.to_thread.run_sync(
                    self._read_memory,
                    abandon_on_cancel=True,  # type: ignore[call-arg]  # the stubs know an older trio
                )

    async def _freed(
        self, before: Sequence[GpuMemory], own_pids: frozenset[int]
    ) -> tuple[int | None, dict[int, int]]:
        """Return the bytes that came back, None if unknown, and what our processes still hold."""
        if not before:
            return None, {}
        until_s = now_s() + DRIVER_DEADLINE_S
        while True:
            after: list[GpuMemory] = []
            await self._note_memory(after)
            if not after:
                return None, {}
            held = {pid: size for gpu in after for pid, size in _own(gpu, own_pids).items()}
            if not held or now_s() >= until_s:
                return _freed_bytes(before, after, own_pids), held
            await trio.sleep(LOOK_EVERY_S)  # noqa: TID251 - the driver frees it a little later


def _own(gpu: GpuMemory, own_pids: frozenset[int]) -> dict[int, int]:
    return {pid: size for pid, size in gpu.holders.items() if pid in own_pids}


def _freed_bytes(
    before: Sequence[GpuMemory], after: Sequence[GpuMemory], own_pids: frozenset[int]
) -> int:
    """Return what our processes held and hold no more; in containers, what has become free."""
    own_before = sum(size for gpu in before for size in _own(gpu, own_pids).values())
    own_after = sum(size for gpu in after for size in _own(gpu, own_pids).values())
    if own_before:
        return max(0, own_before - own_after)
    free_before = {gpu.uuid: gpu.free_bytes or 0 for gpu in before}
    grown = sum((gpu.free_bytes or 0) - free_before.get(gpu.uuid, 0) for gpu in after)
    return max(0, grown)


def _find_family(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes and all that they started."""
    family = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            members = family_of(pid)
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    family.append(psutil.Process(member))
    return family


async def _end_rest(family: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Wait for the family to be gone, kill the rest of it; return who cannot be ended."""
    left = await _wait_gone(family)
    for process in left:
        log.warning("process=%d outlives what started it: killed", process.pid)
        with contextlib.suppress(psutil.Error):
            process.kill()
    return await _wait_gone(left)


async def _wait_gone(family: Iterable[psutil.Process]) -> list[psutil.Process]:
    until_s = now_s() + GONE_DEADLINE_S
    while True:
        left = [process for process in family if _is_alive(process)]
        if not left or now_s() >= until_s:
            return left
        await trio.sleep(LOOK_EVERY_S)  # noqa: TID251 - other people's children cannot be awaited


def _is_alive(process: psutil.Process) -> bool:
    try:
        # A zombie holds nothing. Not `wait`: it would take the exit status from who waits for it.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _problem(left: Sequence[psutil.Process], holders: dict[int, int]) -> str:
    if left:
        named = ", ".join(f"process {process.pid}" for process in left)
        return f"{named} cannot be ended and may still hold the device"
    if holders:
        named = ", ".join(described(pid, size) for pid, size in holders.items())
        return f"GPU memory has not come back: the driver still counts it for {named}"
    return ""
