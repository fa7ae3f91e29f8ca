"""What breaks on an owner's machine: each fault is told, comes to an end, and costs no work."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fakes.bus_services import Service, private_bus, serving
from tests.fakes.freezer import freezing
from tests.system.agents import is_alive, wait_until
from tests.system.faults import (
    SETTINGS,
    Disk,
    Memory,
    WallClock,
    build_shim,
    faulty_agent,
    memory_group,
    own_disk,
    stand_still,
)
from tests.system.swarms import report
from volunteer.policy.sensors.system_bus import MANAGER

pytestmark = [pytest.mark.system, pytest.mark.slow]
DAY_S = 86400
SMALL_DISK = SETTINGS + "disk_min_free_bytes = 67108864\n"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with own_disk(tmp_path, size_mb=256) as made:
        yield made


@pytest.mark.timeout(180)
def test_a_full_disk_pauses_and_nothing_is_lost_when_there_is_room_again(
    tmp_path: Path, disk: Disk
) -> None:
    with faulty_agent(tmp_path, disk.home, SMALL_DISK) as agent:
        agent.spawn()
        agent.wait_contributing()
        agent.wait_rounds(1)
        before = agent.status()
        disk.fill()
        full = agent.wait_state("waiting", "the disk is nearly full", 60)
        report(f"full disk: {full.reason}; ends when {full.resumes_when}")
        assert agent.allmende("logs").returncode == 0
        wait_until("its children are gone", lambda: len(agent.family()) == 1, 30)
        disk.make_room()
        after = agent.wait_contributing(before.inner_step)
        agent.wait_rounds(2)
        assert after.tokens_done >= before.tokens_done - before.tokens_since_contribution
        agent.wait_logged("the disk is nearly full")
        agent.verify_sound()


@pytest.mark.timeout(60)
def test_a_read_only_home_is_said_in_one_line(tmp_path: Path, disk: Disk) -> None:
    with faulty_agent(tmp_path, disk.home) as agent:
        disk.unmount()
        disk.mount("ro")
        agent.spawn()
        assert agent.processes[-1].wait(30) == 2
        (line,) = agent.said().splitlines()
        assert "cannot be" in line
        assert "(hint: make it writable" in line
        done = agent.allmende("start", "--ignore-idle")
        assert done.returncode == 2
        assert "cannot be" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_disk_that_fails_under_way_ends_it_with_the_reason_and_costs_no_work(
    tmp_path: Path, disk: Disk
) -> None:
    with faulty_agent(tmp_path, disk.home, SMALL_DISK) as agent:
        agent.spawn()
        agent.wait_contributing()
        agent.wait_rounds(2)
        before = agent.status()
        disk.fail()
        told = agent.wait_state("waiting", "Read-only file system", 90)
        report(f"failed disk: {told.reason}; ends when {told.resumes_when}")
        agent.end()
        assert "read-only" in agent.said().lower()
        disk.repair()
        agent.spawn()
        agent.wait_contributing(before.inner_step)
        agent.wait_rounds(2)
        agent.verify_sound()


@pytest.mark.full
@pytest.mark.timeout(180)
def test_a_clock_that_is_set_forward_and_back_by_a_day_changes_nothing(tmp_path: Path) -> None:
    clock = WallClock(tmp_path)
    shim = build_shim(tmp_path)
    with faulty_agent(tmp_path, LD_PRELOAD=str(shim), FAULT_CLOCK=str(clock.file)) as agent:
        agent.spawn()
        first = agent.wait_contributing()
        for offset_s, words in ((DAY_S, "forward by 24 h"), (-DAY_S, "back by 48 h")):
            clock.set(offset_s)
            agent.wait_logged(words)
            status = agent.wait_rounds(2, 30)
            assert status.trainer_pid == first.trainer_pid, "nothing was stopped"
            assert status.state == "contributing"
            assert status.last_confirmed_s is None or 0 <= status.last_confirmed_s < 60
            assert 0 <= status.round_elapsed_s < 60
        agent.wait_for("work is confirmed", lambda s: s.tokens_confirmed > 0, 30)
        agent.verify_sound()
        assert agent.stats().contributed_s < 180
        rounds = [point.round_index for point in agent.history()]
        assert rounds == sorted(rounds)


@pytest.mark.full
@pytest.mark.timeout(180)
def test_memory_that_others_use_up_pauses_until_it_is_free(tmp_path: Path) -> None:
    """An 8 GB machine of which 95 % are used: faked where the system tells it."""
    memory = Memory(tmp_path)
    with faulty_agent(
        tmp_path, LD_PRELOAD=str(build_shim(tmp_path)), FAULT_MEMINFO=str(memory.file)
    ) as agent:
        agent.spawn()
        before = agent.wait_contributing()
        memory.fill(8_000_000, 400_000)
        told = agent.wait_state("waiting", "memory is short: 0.4 GB available")
        report(f"95 % of the memory used: {told.reason}; ends when {told.resumes_when}")
        wait_until("its memory is given back", lambda: len(agent.family()) == 1, 10)
        paused = agent.status()
        assert paused.inner_step >= before.inner_step, "all steps were saved"
        memory.free()
        agent.wait_contributing(paused.inner_step)
        agent.wait_rounds(1)
        assert "memory is short" in agent.logged()
        agent.verify_sound()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_trainer_that_is_stopped_by_a_signal_is_woken_and_loses_nothing(tmp_path: Path) -> None:
    with faulty_agent(tmp_path) as agent:
        agent.spawn()
        before = agent.wait_contributing()
        assert before.trainer_pid is not None
        trainer = psutil.Process(before.trainer_pid)
        trainer.send_signal(signal.SIGSTOP)
        begun_s = time.monotonic()
        told = agent.wait_state("waiting", "The trainer was stopped by a signal from outside")
        noticed_s = time.monotonic() - begun_s
        stopped = agent.status()
        after = agent.wait_contributing(stopped.inner_step)
        report(
            f"stopped trainer: told after {noticed_s:.1f} s ({told.reason}), steps again after "
            f"{time.monotonic() - begun_s:.1f} s"
        )
        assert after.trainer_pid == before.trainer_pid, "woken, not started anew"
        agent.wait_logged("child=trainer was stopped by a signal from outside")
        agent.wait_logged("child=trainer woken")
        # And the pause of an owner who does not know of that: it is woken to save its steps.
        trainer.send_signal(signal.SIGSTOP)
        held = agent.status()
        assert agent.allmende("pause").returncode == 0
        assert agent.status().inner_step >= held.inner_step
        assert "killed" not in agent.logged()
        assert agent.allmende("resume").returncode == 0
        agent.wait_contributing(held.inner_step)
        agent.wait_rounds(1)
        agent.verify_sound()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_an_agent_that_is_stopped_by_a_signal_does_not_leave_its_trainer_at_work(
    tmp_path: Path,
) -> None:
    with faulty_agent(tmp_path) as agent:
        agent.spawn()
        before = agent.wait_contributing()
        trainer_pid = before.trainer_pid
        assert trainer_pid is not None
        stopped = psutil.Process(agent.pids[-1])
        stopped.suspend()
        try:
            begun_s = time.monotonic()
            wait_until("its trainer has ended", lambda: not is_alive(trainer_pid), 15)
            gone_s = time.monotonic() - begun_s
        finally:
            stopped.resume()
        agent.wait_logged("trainer had saved and ended, as this agent stood still")
        after = agent.wait_contributing(before.inner_step)
        report(f"stopped agent: its trainer was gone {gone_s:.1f} s later")
        assert after.trainer_pid != trainer_pid
        agent.wait_rounds(1)
        agent.verify_sound()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_trainer_that_the_system_kills_for_memory_is_told_so(tmp_path: Path) -> None:
    """A real kill by the kernel: the trainer alone is in a group that may hold little."""
    with memory_group(limit_bytes=16_384) as group, faulty_agent(tmp_path) as agent:
        agent.spawn()
        before = agent.wait_contributing()
        (group / "cgroup.procs").write_text(str(before.trainer_pid), "ascii")
        told = agent.wait_state("waiting", "There is too little memory to train", 60)
        report(f"killed for memory: {told.reason}; ends when {told.resumes_when}")
        assert told.resumes_at_utc
        agent.wait_logged("trainer paused: there is too little memory to train")
        assert agent.allmende("resume").returncode == 0, "the owner need not wait"
        agent.wait_contributing(0)
        agent.wait_rounds(1)
        agent.verify_sound()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_trainer_that_hangs_in_its_driver_is_given_up_and_begun_anew(tmp_path: Path) -> None:
    """The watch waits for 300 s; a frozen process ignores SIGKILL, as one in a driver does."""
    with freezing() as freezer, faulty_agent(tmp_path) as agent:
        agent.spawn()
        before = agent.wait_contributing()
        agent.wait_rounds(2)
        held = agent.status()
        assert held.trainer_pid is not None
        freezer.freeze(held.trainer_pid)
        begun_s = time.monotonic()
        told = agent.wait_state("waiting", "The trainer was killed and does not end", 360)
        report(f"hung trainer: given up after {time.monotonic() - begun_s:.0f} s ({told.reason})")
        paused = agent.allmende("pause")
        assert paused.returncode == 1, "the owner need not wait for it, and is told what is held"
        assert "cannot be ended" in paused.stderr
        assert agent.allmende("resume").returncode == 0
        assert agent.status().trainer_pid == held.trainer_pid, "no second one beside it"
        freezer.thaw()
        agent.wait_for("another one", lambda s: s.trainer_pid not in (None, held.trainer_pid), 60)
        after = agent.wait_contributing(before.inner_step)
        agent.wait_rounds(2)
        lost_s = (held.tokens_done - after.tokens_done) / held.tokens_per_s
        assert lost_s <= 10.0, "twice `checkpoint_every_s` of training, on a busy machine"
        agent.wait_logged("it has taken no step for 300 s")
        agent.verify_sound()


class Logind:
    """A twin of logind on a bus of its own, that says when the machine sleeps."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.locks: list[int] = []
        """Our ends of the delay locks that were handed out, the newest last."""
        path = MANAGER.object_path
        service.answers[path, "Inhibit"] = self._inhibit
        service.answers[path, "ListSessions"] = ("a(susso)", ([],))
        service.answers[path, "ListInhibitors"] = ("a(ssssuu)", ([],))
        self.say(is_going_to_sleep=False)

    def say(self, *, is_going_to_sleep: bool) -> None:
        """Say what logind says with PrepareForSleep."""
        path = MANAGER.object_path
        self._service.set_property(path, "PreparingForSleep", "b", is_going_to_sleep)

    def is_lock_held(self) -> bool:
        """Return whether the newest lock still keeps the machine from sleeping."""
        os.set_blocking(self.locks[-1], False)
        try:
            return os.read(self.locks[-1], 1) != b""
        except BlockingIOError:
            return True

    def close(self) -> None:
        for descriptor in self.locks:
            os.close(descriptor)

    def _inhibit(self, *_arguments: object) -> tuple[str, tuple[int]]:
        read_end, write_end = os.pipe()
        self.locks.append(read_end)
        # It is sent after this returns; the copy that we keep must not hold the pipe open.
        self._handed = write_end
        return ("h", (write_end,))

    def drop_copy(self) -> None:
        """Close our own copy of what was handed out last."""
        os.close(self._handed)


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_machine_that_sleeps_is_let_sleep_when_all_is_saved_and_goes_on_after_it(
    tmp_path: Path,
) -> None:
    """Sleep as logind announces it; the processes then stand still for as long as it lasts."""
    with (
        private_bus(tmp_path) as address,
        serving(address, "org.freedesktop.login1") as service,
    ):
        logind = Logind(service)
        with faulty_agent(tmp_path, DBUS_SYSTEM_BUS_ADDRESS=address) as agent:
            agent.spawn()
            agent.wait_contributing()
            wait_until("a delay lock is held", lambda: logind.locks, 10)
            logind.drop_copy()
            assert logind.is_lock_held()
            before = agent.status()
            begun_s = time.monotonic()
            logind.say(is_going_to_sleep=True)
            told = agent.wait_state("waiting", "the machine is going to sleep", 10)
            wait_until("it may sleep", lambda: not logind.is_lock_held(), 10)
            report(f"sleep: told ({told.reason}) and all saved {time.monotonic() - begun_s:.1f} s")
            assert time.monotonic() - begun_s < 5.0, "logind waits no longer"
            asleep = agent.status()
            assert asleep.trainer_pid is None
            assert asleep.inner_step >= before.inner_step
            stand_still(agent.family(), 5.0)
            logind.say(is_going_to_sleep=False)
            agent.wait_contributing(asleep.inner_step)
            agent.wait_rounds(2)
            agent.wait_logged("the machine is going to sleep")
            agent.verify_sound()
        logind.drop_copy()
        logind.close()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_family_that_stands_still_for_a_minute_goes_on_where_it_was(tmp_path: Path) -> None:
    with faulty_agent(tmp_path) as agent:
        agent.spawn()
        before = agent.wait_contributing()
        agent.wait_rounds(1)
        family = agent.family()
        stand_still(family, 60.0)
        begun_s = time.monotonic()
        after = agent.wait_contributing(before.inner_step)
        agent.wait_rounds(2)
        report(f"after a minute: two commits {time.monotonic() - begun_s:.1f} s later")
        assert after.trainer_pid == before.trainer_pid
        assert [process.pid for process in agent.family()] == [p.pid for p in family]
        assert re.search(r"stood still for (5\d|6\d) s", agent.logged())
        agent.verify_sound()
