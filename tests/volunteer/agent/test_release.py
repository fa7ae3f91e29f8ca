"""A pause is believed only when the whole family is gone and the driver counts nothing for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import psutil
import pytest
import trio

from volunteer.agent import release as release_module
from volunteer.agent.release import Releaser
from volunteer.answers import Release
from volunteer.policy.sensors.nvidia import GpuMemory
from volunteer.policy.sensors.watcher import SensorError

GB = 10**9
WITH_CHILD = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)\n"
    "print(child.pid, flush=True)\n"
    "input()\n"
)
"""A process that starts another one, which outlives it."""


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    process.stdout.close()


def child_of(parent: subprocess.Popen[bytes]) -> int:
    assert parent.stdout is not None
    return int(parent.stdout.readline())


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def release(
    releaser: Releaser, *parents: subprocess.Popen[bytes], is_on_gpu: bool = True
) -> Release:
    async def stop() -> None:
        for parent in parents:
            parent.kill()
            await trio.to_thread.run_sync(parent.wait)

    async def main() -> Release:
        pids = [parent.pid for parent in parents]
        return await releaser.release(pids, stop, is_on_gpu=is_on_gpu)

    return trio.run(main)


class Driver:
    """What the driver says, one answer after the other; the last one for good."""

    def __init__(self, *answers: Sequence[GpuMemory] | SensorError) -> None:
        self.answers = list(answers)

    def read(self) -> Sequence[GpuMemory]:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, SensorError):
            raise answer
        return answer


def gpu(free: int | None, holders: dict[int, int], uuid: str = "GPU-a") -> list[GpuMemory]:
    return [GpuMemory(uuid=uuid, free_bytes=free, holders=holders)]


def test_what_a_child_had_started_is_ended_too(parent: subprocess.Popen[bytes]) -> None:
    grandchild = child_of(parent)
    os.kill(grandchild, signal.SIGSTOP)  # it would not notice that its stdin has ended
    done = release(Releaser(None), parent)
    assert not is_alive(parent.pid)
    assert not is_alive(grandchild)
    assert (done.num_processes, done.gpu_freed_bytes, done.problem) == (2, None, "")


def test_who_cannot_be_ended_is_named(
    parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    grandchild = child_of(parent)
    os.kill(grandchild, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "kill", lambda process: None)
        patch.setattr(release_module, "GONE_DEADLINE_S", 0.05)
        done = release(Releaser(None), parent)
    os.kill(grandchild, signal.SIGKILL)
    assert done.problem == f"process {grandchild} cannot be ended and may still hold the device"


def test_children_that_are_not_there_any_more_give_nothing_back() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert release(Releaser(None), gone).num_processes == 0


def test_a_stop_that_hangs_does_not_hang_the_pause(
    parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_module, "STOP_DEADLINE_S", 0.05)

    async def main() -> Release:
        return await Releaser(None).release([parent.pid], trio.sleep_forever, is_on_gpu=False)

    assert trio.run(main).problem == "", "it is killed in the end"
    parent.wait()


def test_memory_that_comes_back_is_counted(parent: subprocess.Popen[bytes]) -> None:
    pid = parent.pid
    driver = Driver(
        gpu(GB, {pid: 7 * GB, 4242: GB}), gpu(GB, {pid: 7 * GB, 4242: GB}), gpu(8 * GB, {4242: GB})
    )
    done = release(Releaser(driver.read), parent)
    assert (done.gpu_freed_bytes, done.problem) == (7 * GB, "")


def test_memory_that_does_not_come_back_is_an_error_with_a_name(
    parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_module, "DRIVER_DEADLINE_S", 0.2)
    driver = Driver(gpu(GB, {parent.pid: 7 * GB}), gpu(GB, {parent.pid: 2 * GB}))
    done = release(Releaser(driver.read), parent)
    assert done.gpu_freed_bytes == 5 * GB
    assert done.problem == (
        "GPU memory has not come back: the driver still counts it for"
        f" process {parent.pid} (2.0 GB)"
    )


def test_in_a_container_what_becomes_free_is_counted(parent: subprocess.Popen[bytes]) -> None:
    before = [*gpu(GB, {}), *gpu(2 * GB, {}, "GPU-b"), *gpu(None, {}, "GPU-c")]
    after = [*gpu(8 * GB, {}), *gpu(2 * GB, {}, "GPU-b"), *gpu(None, {}, "GPU-c")]
    done = release(Releaser(Driver(before, after).read), parent)
    assert (done.gpu_freed_bytes, done.problem) == (7 * GB, "")


@pytest.mark.parametrize("when", [0, 1])
def test_a_driver_that_does_not_answer_leaves_the_amount_unknown(
    parent: subprocess.Popen[bytes], when: int
) -> None:
    answers: list[Sequence[GpuMemory] | SensorError] = [gpu(GB, {parent.pid: GB}), gpu(2 * GB, {})]
    answers[when] = SensorError("the NVIDIA driver was updated: reboot")
    done = release(Releaser(Driver(*answers).read), parent)
    assert (done.gpu_freed_bytes, done.problem) == (None, "")


def test_where_the_cpu_trains_what_others_free_is_not_counted(
    parent: subprocess.Popen[bytes],
) -> None:
    driver = Driver(gpu(GB, {}), gpu(8 * GB, {}))
    assert release(Releaser(driver.read), parent, is_on_gpu=False).gpu_freed_bytes is None
