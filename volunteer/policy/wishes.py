"""What the owner's Config says to the idle policy.

Runs in: agent. Pure.
"""

from __future__ import annotations

from volunteer.config import Config
from volunteer.policy.hours import parse_hours
from volunteer.policy.signals import IdleConfig


def idle_config(config: Config, *, is_idle_ignored: bool) -> IdleConfig:
    """Return the policy's part of `config`."""
    return IdleConfig(
        disk_min_free_bytes=config.disk_min_free_bytes,
        disk_max_bytes=config.disk_max_bytes,
        ram_min_available_bytes=config.ram_min_available_bytes,
        ram_max_bytes=config.ram_max_bytes,
        temperature_limit_celsius=config.temperature_limit_celsius,
        gpu_temperature_limit_celsius=config.gpu_temperature_limit_celsius,
        pause_on_battery=config.pause_on_battery,
        pause_on_metered=config.pause_on_metered,
        hours=parse_hours(config.hours),
        network_hours=parse_hours(config.network_hours),
        monthly_data_budget_bytes=config.monthly_data_budget_bytes,
        idle_s=60.0 * config.idle_minutes,
        lock_counts_as_idle=config.lock_counts_as_idle,
        terminals_count_as_use=config.terminals_count_as_use,
        pause_on_inhibitors=config.pause_on_inhibitors,
        pause_on_games=config.pause_on_games,
        headless=config.headless,
        others_cpu_limit=config.others_cpu_limit,
        others_gpu_limit=config.others_gpu_limit,
        gpu_min_free_bytes=config.gpu_min_free_bytes,
        ignore_idle=is_idle_ignored,
        pause_after_s=config.pause_after_s,
        resume_after_s=config.resume_after_s,
    )
