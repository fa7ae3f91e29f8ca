"""The systems' programs that start services, as far as `allmende service` uses them.

Each keeps what was told, as the real one does, and fails where the real one fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from volunteer.service.service import Finished

OK = Finished(0, "", "")


@dataclass
class FakeSystemctl:
    """`systemctl --user`."""

    units_dir: Path
    has_manager: bool = True
    active: set[str] = field(default_factory=set)
    is_stubborn: bool = False
    """Whether a unit that is told to stop goes on."""
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> Finished:
        assert tuple(argv[:2]) == ("systemctl", "--user")
        verb, *rest = argv[2:]
        self.calls.append(tuple(argv[2:]))
        if not self.has_manager:
            return Finished(1, "", "Failed to connect to bus: No medium found\n")
        unit = rest[-1] if rest else ""
        match verb:
            case "show" | "daemon-reload" | "reset-failed":
                return OK
            case "enable" | "start":
                return self._change(verb, unit)
            case "disable":
                self._wanted(unit).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # systemd removes the folder once it is empty
                    self._wanted(unit).parent.rmdir()
                if not self.is_stubborn:
                    self.active.discard(unit)
                return OK
            case "is-active":
                is_active = unit in self.active
                return Finished(0 if is_active else 3, "active" if is_active else "inactive", "")
            case "is-failed":
                return Finished(1, "inactive", "")
        raise AssertionError(argv)

    def _change(self, verb: str, unit: str) -> Finished:
        if not (self.units_dir / unit).exists():
            return Finished(1, "", f"Failed: Unit file {unit} does not exist.\n")
        if verb == "start":
            self.active.add(unit)
        else:
            self._wanted(unit).parent.mkdir(exist_ok=True)
            if not self._wanted(unit).is_symlink():
                self._wanted(unit).symlink_to(self.units_dir / unit)
        return OK

    def _wanted(self, unit: str) -> Path:
        return self.units_dir / "default.target.wants" / unit


@dataclass
class FakeLaunchctl:
    """`launchctl`, for the session gui/501."""

    has_session: bool = True
    loaded: set[str] = field(default_factory=set)
    disabled: set[str] = field(default_factory=set)
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> Finished:
        program, verb, target, *rest = argv
        assert program == "launchctl"
        self.calls.append(tuple(argv[1:]))
        label = target.removeprefix("gui/501").removeprefix("/")
        not_found = Finished(113, "", f"Could not find service {label!r} in domain\n")
        match verb:
            case "print" if not label:
                return OK if self.has_session else Finished(125, "", "Domain does not support\n")
            case "print":
                return Finished(0, "\tstate = running\n", "") if label in self.loaded else not_found
            case "enable":
                self.disabled.discard(label)
                return OK
            case "bootstrap":
                label = Path(rest[0]).stem
                if label in self.loaded or label in self.disabled:
                    return Finished(5, "", "Bootstrap failed: 5: Input/output error\n")
                self.loaded.add(label)
                return OK
            case "bootout":
                if label not in self.loaded:
                    return Finished(3, "", "Boot-out failed: 3: No such process\n")
                self.loaded.discard(label)
                return OK
        raise AssertionError(argv)


@dataclass
class FakeSchtasks:
    """`schtasks` of Windows."""

    tasks: dict[str, str] = field(default_factory=dict)
    """Name -> definition."""
    running: set[str] = field(default_factory=set)
    calls: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> Finished:
        program, verb, *rest = argv
        assert program == "schtasks"
        self.calls.append(tuple(argv[1:]))
        name = rest[rest.index("/TN") + 1]
        if verb == "/Create":
            assert "/F" in rest
            self.tasks[name] = Path(rest[rest.index("/XML") + 1]).read_text("utf-16")
            return OK
        if name not in self.tasks:
            return Finished(1, "", "ERROR: The system cannot find the file specified.\n")
        match verb:
            case "/Query" if "/XML" in rest:
                return Finished(0, self.tasks[name], "")
            case "/Query":
                state = "Running" if name in self.running else "Ready"
                return Finished(0, f'"\\{name}","N/A","{state}"\n', "")
            case "/Run":
                self.running.add(name)
            case "/End":
                self.running.discard(name)
            case "/Delete":
                assert "/F" in rest
                del self.tasks[name]
            case _:
                raise AssertionError(argv)
        return OK
