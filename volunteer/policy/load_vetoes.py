"""The rows of what other programs do: games, exclusive programs, CPU, GPU, GPU memory.

Runs in: agent. Stage 1 of the map. Pure. An unattended game or a streamed one moves no mouse, so
these count even where nobody touches the machine.
"""

from __future__ import annotations

from volunteer.policy.signals import IdleConfig, Signals
from volunteer.policy.veto import Cause, Veto, gb, named, percent


def _is_cpu_used(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    used = signals.others_cpu_fraction
    return used is not None and used >= config.others_cpu_limit


def _cpu_reason(signals: Signals, config: IdleConfig) -> str:
    used = percent(signals.others_cpu_fraction or 0.0)
    who = f": {named(signals.others_cpu)}" if signals.others_cpu else ""
    return f"other programs use {used} of the CPU{who}"


def _is_gpu_used(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    used = signals.gpu.others_fraction
    return used is not None and used >= config.others_gpu_limit


def _gpu_reason(signals: Signals, config: IdleConfig) -> str:
    used = percent(signals.gpu.others_fraction or 0.0)
    who = f": {named(signals.gpu.others)}" if signals.gpu.others else ""
    return f"other programs use {used} of the GPU{who}"


def _lacks_gpu_memory(signals: Signals, config: IdleConfig, now_s: float, was: bool) -> bool:
    free = signals.gpu.free_bytes
    return free is not None and free < config.gpu_min_free_bytes


def _gpu_memory_reason(signals: Signals, config: IdleConfig) -> str:
    who = f": {named(signals.gpu.others)} hold it" if signals.gpu.others else ""
    return f"the GPU has only {gb(signals.gpu.free_bytes or 0)} of memory left{who}"


GAME = Veto(
    cause=Cause.GAME,
    is_on=lambda config: config.pause_on_games and not config.ignore_idle,
    is_present=lambda signals, config, now_s, was: signals.games > 0,
    reason=lambda signals, config: "a game runs (GameMode says)",
    resumes_when=lambda signals, config: "it has ended (`pause_on_games`)",
    calm_reason="the game has ended",
)
EXCLUSIVE = Veto(
    cause=Cause.EXCLUSIVE,
    is_present=lambda signals, config, now_s, was: bool(signals.exclusive_programs),
    reason=lambda signals, config: (
        f"{named(signals.exclusive_programs)} runs, which you want to be alone with"
    ),
    resumes_when=lambda signals, config: "it has ended (`exclusive_programs`)",
    calm_reason="no program runs any more that you want to be alone with",
)
CPU = Veto(
    cause=Cause.CPU,
    is_present=_is_cpu_used,
    reason=_cpu_reason,
    resumes_when=lambda signals, config: (
        f"they use less than {percent(config.others_cpu_limit)} (`others_cpu_limit`)"
    ),
    calm_reason="other programs have let go of the CPU",
)
GPU = Veto(
    cause=Cause.GPU,
    is_present=_is_gpu_used,
    reason=_gpu_reason,
    resumes_when=lambda signals, config: (
        f"they use less than {percent(config.others_gpu_limit)} (`others_gpu_limit`)"
    ),
    calm_reason="other programs have let go of the GPU",
)
GPU_MEMORY = Veto(
    cause=Cause.GPU_MEMORY,
    is_present=_lacks_gpu_memory,
    reason=_gpu_memory_reason,
    resumes_when=lambda signals, config: (
        f"{gb(config.gpu_min_free_bytes)} are free (`gpu_min_free_bytes`)"
    ),
    calm_reason="there is GPU memory again",
)
