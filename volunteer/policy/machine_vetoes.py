"""The rows of what the machine itself needs: disk, sleep, memory, coolness, power, a free network.

Runs in: agent. Stage 1 of the map. Pure.
"""

from __future__ import annotations

from volunteer.policy.signals import IdleConfig, Signals
from volunteer.policy.veto import Cause, Veto, amount, at_once, gb

COOLED_BY_CELSIUS = 10.0
"""How far below the limit it must cool: under our own load it would be back at once."""
OWN_MEMORY_REST_S = 600.0
"""After having held too much memory: our own doing, which the next try repeats."""
AWAKE_FOR_S = 15.0
"""After waking: the driver and the network need a moment, and the readings are from before."""


def _is_disk_full(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    free = signals.disk_free_bytes
    return free is None or free < config.disk_min_free_bytes


def _disk_reason(signals: Signals, config: IdleConfig) -> str:
    if signals.disk_free_bytes is None:
        return "nobody can tell how full the disk is"
    return f"the disk is nearly full: {gb(signals.disk_free_bytes)} free"


def _disk_ends_when(signals: Signals, config: IdleConfig) -> str:
    if signals.disk_free_bytes is None:
        return "the disk can be read again"
    return f"{gb(config.disk_min_free_bytes)} are free (`disk_min_free_bytes`)"


def _takes_too_much_disk(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    taken = signals.own_disk_bytes
    return taken is not None and taken > config.disk_max_bytes


def _holds_too_much_memory(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    held = signals.own_ram_bytes
    return held is not None and held > config.ram_max_bytes


def _is_asleep(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    if signals.is_going_to_sleep:
        return True
    return signals.woke_at_s is not None and now_s < signals.woke_at_s + AWAKE_FOR_S


def _sleep_ends_at_s(signals: Signals, config: IdleConfig, now_s: float) -> float | None:
    if signals.is_going_to_sleep or signals.woke_at_s is None:
        return None
    return signals.woke_at_s + AWAKE_FOR_S


def _lacks_memory(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    available = signals.ram_available_bytes
    return available is not None and available < config.ram_min_available_bytes


def _is_above(value: float | None, limit: float, was: bool) -> bool:
    return value is not None and value >= (limit - COOLED_BY_CELSIUS if was else limit)


def _is_hot(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    cpu, gpu = signals.temperature_celsius, signals.gpu.temperature_celsius
    return _is_above(cpu, config.temperature_limit_celsius, was) or _is_above(
        gpu, config.gpu_temperature_limit_celsius, was
    )


def _is_cpu_hotter(signals: Signals, config: IdleConfig) -> bool:
    """Return whether the CPU is nearer to its limit than the GPU to its own."""
    cpu, gpu = signals.temperature_celsius, signals.gpu.temperature_celsius
    if cpu is None or gpu is None:
        return gpu is None
    return cpu - config.temperature_limit_celsius >= gpu - config.gpu_temperature_limit_celsius


def _heat_reason(signals: Signals, config: IdleConfig) -> str:
    is_cpu = _is_cpu_hotter(signals, config)
    celsius = signals.temperature_celsius if is_cpu else signals.gpu.temperature_celsius
    return f"the {'CPU' if is_cpu else 'GPU'} is hot: {celsius or 0.0:.0f} degrees"


def _heat_ends_when(signals: Signals, config: IdleConfig) -> str:
    if _is_cpu_hotter(signals, config):
        limit, key = config.temperature_limit_celsius, "temperature_limit_celsius"
    else:
        limit, key = config.gpu_temperature_limit_celsius, "gpu_temperature_limit_celsius"
    return f"it has cooled below {limit - COOLED_BY_CELSIUS:.0f} degrees (`{key}` less 10)"


def _battery_reason(signals: Signals, config: IdleConfig) -> str:
    if signals.on_battery is None:
        return "nobody can tell whether the machine runs on battery"
    return "the machine runs on battery"


def _battery_ends_when(signals: Signals, config: IdleConfig) -> str:
    if signals.on_battery is None:
        return "the battery can be read, or `pause_on_battery` is false"
    return "it is on mains power"


DISK = Veto(
    cause=Cause.DISK,
    is_on=lambda config: True,
    is_present=_is_disk_full,
    reason=_disk_reason,
    resumes_when=_disk_ends_when,
    calm_reason="the disk has room again",
)
OWN_DISK = Veto(
    cause=Cause.OWN_DISK,
    is_on=lambda config: config.disk_max_bytes > 0,
    is_present=_takes_too_much_disk,
    reason=lambda signals, config: (
        f"its data takes {amount(signals.own_disk_bytes or 0)} of the disk, more than you allow"
    ),
    resumes_when=lambda signals, config: (
        f"it takes less than {amount(config.disk_max_bytes)} (`disk_max_bytes`);"
        " old states go first"
    ),
    calm_reason="its data takes no more of the disk than you allow",
)
SLEEP = Veto(
    cause=Cause.SLEEP,
    is_on=lambda config: True,
    is_present=_is_asleep,
    reason=lambda signals, config: (
        "the machine is going to sleep"
        if signals.is_going_to_sleep
        else "the machine has just woken"
    ),
    resumes_when=lambda signals, config: (
        "it has woken" if signals.is_going_to_sleep else f"it has been awake for {AWAKE_FOR_S:g} s"
    ),
    ends_at_s=_sleep_ends_at_s,
    pause_after_s=at_once,
    resume_after_s=at_once,
)
MEMORY = Veto(
    cause=Cause.MEMORY,
    is_on=lambda config: True,
    is_present=_lacks_memory,
    reason=lambda signals, config: (
        f"memory is short: {gb(signals.ram_available_bytes or 0)} available"
    ),
    resumes_when=lambda signals, config: (
        f"{gb(config.ram_min_available_bytes)} are available (`ram_min_available_bytes`)"
    ),
    calm_reason="there is memory again",
)
OWN_MEMORY = Veto(
    cause=Cause.OWN_MEMORY,
    is_on=lambda config: config.ram_max_bytes > 0,
    is_present=_holds_too_much_memory,
    reason=lambda signals, config: (
        f"it holds {amount(signals.own_ram_bytes or 0)} of memory, more than you allow"
    ),
    resumes_when=lambda signals, config: (
        f"it holds less than {amount(config.ram_max_bytes)} (`ram_max_bytes`),"
        " and is tried again then"
    ),
    calm_reason="it held more memory than you allow (`ram_max_bytes`), and has let go of it",
    pause_after_s=at_once,
    # What it needs it will soon need again: not once a minute for ever.
    resume_after_s=lambda config: max(config.resume_after_s, OWN_MEMORY_REST_S),
)
HEAT = Veto(
    cause=Cause.HEAT,
    is_on=lambda config: True,
    is_present=_is_hot,
    reason=_heat_reason,
    resumes_when=_heat_ends_when,
    calm_reason="the machine has cooled",
)
METERED = Veto(
    cause=Cause.METERED,
    is_on=lambda config: config.pause_on_metered and not config.ignore_idle,
    is_present=lambda signals, config, now_s, was: signals.is_metered is True,
    reason=lambda signals, config: "the network connection is metered",
    resumes_when=lambda signals, config: "another one is used, or `pause_on_metered` is false",
    calm_reason="the network connection is no longer metered",
    holds_network=True,
)
BATTERY = Veto(
    cause=Cause.BATTERY,
    is_on=lambda config: config.pause_on_battery and not config.ignore_idle,
    # A machine that has a battery and hides its state counts as on battery: the owner's side.
    is_present=lambda signals, config, now_s, was: signals.on_battery is not False,
    reason=_battery_reason,
    resumes_when=_battery_ends_when,
    calm_reason="the machine is on mains power again",
)
