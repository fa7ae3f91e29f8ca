"""The owner's duty cycle holds over any time, and micro-batches shrink where they are slow."""

from __future__ import annotations

import pytest

from tests.volunteer.training.tiny_run import tiny_spec
from volunteer.errors import OutOfGpuMemoryError
from volunteer.training.devices import Device, choose_device
from volunteer.training.meter import Meter
from volunteer.training.micro_batches import MicroBatches
from volunteer.training.pace import MAX_MICRO_BATCH_S, DutyCycle


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.8, 1.0])
def test_work_is_the_chosen_part_of_the_time(fraction: float) -> None:
    duty = DutyCycle(fraction)
    worked_s = rested_s = 0.0
    for number in range(200):
        work_s = 0.1 + 0.05 * (number % 7)
        duty.note_work(work_s)
        worked_s += work_s
        # Whoever sleeps oversleeps; that is taken off the next rest.
        slept_s = duty.owed_s * 1.2
        rested_s += slept_s
        duty.note_rest(slept_s)
        assert worked_s / (worked_s + rested_s) <= fraction + 1e-9
    assert worked_s / (worked_s + rested_s) >= fraction * 0.8


def test_rest_that_was_cut_short_is_made_up_for_and_not_saved_up() -> None:
    duty = DutyCycle(0.5)
    duty.note_work(2.0)
    duty.note_rest(0.5)
    assert duty.owed_s == pytest.approx(1.5)
    duty.note_rest(100.0)
    assert duty.owed_s == 0.0
    duty.note_work(1.0)
    assert duty.owed_s == pytest.approx(1.0)


def test_the_speed_is_told_with_the_rest_in_it() -> None:
    meter = Meter(0.0)
    meter.add_step(1.0, 100, 2.0)
    meter.add_rest(3.0)
    meter.add_step(1.0, 100, 2.0)
    assert meter.tokens_per_s == pytest.approx(40.0)


@pytest.fixture
def cpu() -> Device:
    return choose_device("cpu")


def take_step(batches: MicroBatches, now_s: float, micro_batch_s: float, num: int) -> float:
    """Have a step of `num` micro-batches taken; return when it ends."""
    for _ in range(num):
        batches.note_begin(now_s)
        now_s += micro_batch_s
    batches.note_step(now_s, is_whole=True)
    return now_s


def test_slow_micro_batches_are_halved_until_a_stop_is_seen_soon(cpu: Device) -> None:
    batches = MicroBatches(tiny_spec(), cpu)
    most = batches.sequences
    assert most > 1
    now_s = 0.0
    for _ in range(30):
        # As long as the device needs for so many sequences.
        now_s = take_step(batches, now_s, 2.0 * batches.sequences / most, 2)
    assert batches.sequences == max(1, int(most * MAX_MICRO_BATCH_S / 2.0))


def test_one_hiccup_changes_nothing(cpu: Device) -> None:
    batches = MicroBatches(tiny_spec(), cpu)
    most = batches.sequences
    now_s = 0.0
    for _ in range(20):
        now_s = take_step(batches, now_s, 9.0, 1)
        now_s = take_step(batches, now_s, 9.0, 1)
        now_s = take_step(batches, now_s, 0.1, 1)
    assert batches.sequences == most


def test_a_single_sequence_is_not_cut(cpu: Device) -> None:
    batches = MicroBatches(tiny_spec(), cpu)
    now_s = 0.0
    for _ in range(60):
        now_s = take_step(batches, now_s, 9.0, 1)
    assert batches.sequences == 1
    with pytest.raises(OutOfGpuMemoryError):
        batches.halve(MemoryError("no room"))
