"""What the idle policy knows: readings of the sensors and the owner's word.

Runs in: agent. Pure values; `policy.sensors` reads them. A sensor that cannot tell says None.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from volunteer.policy.hours import ALWAYS, WeekHours


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPause:
    """The owner has said pause, snooze or finish; `resume` takes it back."""

    until_s: float | None = None
    """Instant on the agent's clock at which it ends by itself; None: only by `resume`."""
    after_round: int | None = None
    """It begins when the shared state has reached this height (`finish`); None: at once."""
    at_latest_s: float | None = None
    """Instant on the agent's clock at which a `finish` begins even where no round closes; None: it
    waits for the round however long that takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFailure:
    """A source of the owner's presence that should tell, and does not."""

    name: str
    """As in `doctor idle`, e.g. `X11 :0`."""
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReading:
    """When somebody last used this machine, from every source there is."""

    has_desktop: bool | None = False
    """Whether a graphical session is there; None: one may be, out of sight (container, WSL)."""
    idle_s: float | None = None
    """Since the last key or movement on a desktop: the least of what the sources say; None: none
    told."""
    desktop_source: str = ""
    """Which source said `idle_s`."""
    is_locked: bool | None = None
    """Whether every desktop session is locked or in the background; None: nobody tells."""
    terminal_idle_s: float | None = None
    """Since somebody last typed in a terminal that is not talking to this program; infinite where
    nobody has; None: cannot tell."""
    terminal: str = ""
    """Which terminal, e.g. `pts/3`."""
    inhibitors: tuple[str, ...] = ()
    """Programs that ask the system not to count as idle: a film, a presentation."""
    failures: tuple[SourceFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """The GPUs that are trained on, taken together."""

    others_fraction: float | None = None
    """Of the busiest GPU, how much of the time others used it, 0..1; None: cannot tell apart."""
    free_bytes: int | None = None
    """Memory of the fullest GPU that is free or ours; None: cannot tell."""
    temperature_celsius: float | None = None
    """Of the hottest GPU; None: cannot tell."""
    others: tuple[str, ...] = ()
    """Programs of others that hold GPU memory, the largest first, e.g. `blender (3.1 GB)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """All readings of one moment."""

    owner_pause: OwnerPause | None = None
    """None: the owner has not said pause."""
    round_index: int = 0
    """Height of the shared state."""
    local_time: datetime | None = None
    """The owner's wall clock; None: nobody asks for it (no hours are set)."""
    is_going_to_sleep: bool = False
    """Whether the system has said that it will suspend."""
    woke_at_s: float | None = None
    """Instant on the agent's clock at which the machine last woke; None: not since the start."""
    disk_free_bytes: int | None
    """Free to us where the data lies; None: cannot tell."""
    own_disk_bytes: int | None = None
    """What this program's own data takes on the disk; None: nobody asks (`disk_max_bytes` is not
    set), or it cannot be told."""
    ram_available_bytes: int | None = None
    """That programs can still get without swapping; None: cannot tell."""
    own_ram_bytes: int | None = None
    """What all our processes hold for themselves, without file pages that the system can take back;
    None: nobody asks (`ram_max_bytes` is not set), or it cannot be told."""
    temperature_celsius: float | None = None
    """Of the hottest CPU package; None: cannot tell."""
    on_battery: bool | None = False
    """Whether the machine runs on battery; False without one; None: cannot tell."""
    is_metered: bool | None = None
    """Whether the network connection is paid by volume; None: cannot tell."""
    data_used_bytes: int = 0
    """That the network has carried for this program in this calendar month, both directions."""
    data_renews_in_s: float = 0.0
    """Until the next month begins, in UTC."""
    input: InputReading = InputReading()
    games: int = 0
    """Programs that have asked GameMode for the machine."""
    exclusive_programs: tuple[str, ...] = ()
    """Running programs that the owner wants to be alone with."""
    others_cpu_fraction: float | None = None
    """How much of all cores others have used lately, 0..1; None: cannot tell."""
    others_cpu: tuple[str, ...] = ()
    """Who uses it most, e.g. `ffmpeg (72 %)`."""
    gpu: GpuReading = GpuReading()


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleConfig:
    """What the owner wants of the policy."""

    disk_min_free_bytes: int
    """As in Config."""
    disk_max_bytes: int = 0
    """As in Config."""
    ram_min_available_bytes: int = 512 * 1024**2
    """As in Config."""
    ram_max_bytes: int = 0
    """As in Config."""
    temperature_limit_celsius: float = 95.0
    """As in Config."""
    gpu_temperature_limit_celsius: float = 85.0
    """As in Config."""
    pause_on_battery: bool = True
    """As in Config."""
    pause_on_metered: bool = True
    """As in Config."""
    hours: WeekHours = ALWAYS
    """As in Config."""
    network_hours: WeekHours = ALWAYS
    """As in Config."""
    monthly_data_budget_bytes: int = 0
    """As in Config."""
    idle_s: float = 300.0
    """`idle_minutes` of Config."""
    lock_counts_as_idle: bool = True
    """As in Config."""
    terminals_count_as_use: bool = True
    """As in Config."""
    pause_on_inhibitors: bool = True
    """As in Config."""
    pause_on_games: bool = True
    """As in Config."""
    headless: bool = False
    """As in Config."""
    others_cpu_limit: float = 0.25
    """As in Config."""
    others_gpu_limit: float = 0.15
    """As in Config."""
    gpu_min_free_bytes: int = 1024**3
    """As in Config."""
    ignore_idle: bool = False
    """`--ignore-idle`: contribute whatever the policy says, but for the owner's word and what
    protects the machine (disk, memory, heat, sleep)."""
    pause_after_s: float = 10.0
    """As in Config."""
    resume_after_s: float = 60.0
    """As in Config."""
