"""What a run needs of the limits that an owner may set, so that it can ever train.

Runs in: agent, the command line. Pure.
"""

from __future__ import annotations

from volunteer.config import GPU_CONTEXT_BYTES, Config
from volunteer.errors import ConfigError
from volunteer.run import RunSpec
from volunteer.training.layout import num_parameters


def verify_limits(spec: RunSpec, config: Config, *, used_bytes: int | None = None) -> None:
    """Check that the run can do with what the owner allows it at most.

    The bounds are low: what is refused could never run.

    Args:
        spec: the run.
        config: the owner's wishes.
        used_bytes: what the program's data takes on the disk now; None: not to be told.

    Raises:
        ConfigError: naming every limit that is too low, and what is needed.
    """
    num = num_parameters(spec.model)
    needs = {
        # Three states and the next, two snapshots and the next; records and logs.
        "disk_max_bytes": 4 * 8 * num + 3 * 20 * num + 32 * 1024**2,
        # Base and error feedback of the trainer; the libraries' own data.
        "ram_max_bytes": 8 * num + 512 * 1024**2,
        # Weights, gradient, both moments and a temporary; the driver's context.
        "gpu_max_bytes": 20 * num + GPU_CONTEXT_BYTES if config.device not in ("cpu", "mps") else 0,
    }
    short = [
        f"`{key}` is {getattr(config, key) / 1e9:.2f} GB, run {spec.name} needs {need / 1e9:.2f}"
        for key, need in needs.items()
        if 0 < getattr(config, key) < need
    ]
    if not short:
        return
    used = "" if used_bytes is None else f" (its data takes {used_bytes / 1e9:.2f} GB now)"
    raise ConfigError(
        f"it could never run: {'; '.join(short)}{used}",
        hint="allow more, or take part in a smaller run",
    )
