"""What the `idle_detect` daemon says, where it is installed.

Runs in: agent. Two int64 in shared memory, seconds since 1970: when it wrote, and when somebody was
last active, on whatever it watches. BOINC reads the same.
"""

from __future__ import annotations

import struct
import time

from volunteer.policy.sensors.display import DisplayReading
from volunteer.policy.sensors.places import Places
from volunteer.policy.sensors.watcher import SensorError

MAX_AGE_S = 60.0


class SharedIdleSource:
    """The daemon's shared memory."""

    name = "idle_detect"

    def __init__(self, places: Places) -> None:
        """Read it where this machine has it."""
        self._file = places.dev_dir / "shm" / "idle_detect_shmem"

    def read(self) -> DisplayReading | None:
        """Return when somebody was active; None where there is no such daemon."""
        try:
            with self._file.open("rb") as stream:
                data = stream.read(16)
        except FileNotFoundError:
            return None
        if len(data) < 16:
            raise SensorError("its shared memory is too small")
        updated_s, active_s = struct.unpack("=qq", data)
        now_s = time.time()
        if abs(now_s - updated_s) > MAX_AGE_S:
            raise SensorError(f"it has not written for {now_s - updated_s:.0f} s")
        return DisplayReading(time.monotonic() - max(0.0, now_s - active_s))

    def close(self) -> None:
        """Nothing is held open."""
