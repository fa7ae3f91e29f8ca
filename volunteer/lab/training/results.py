"""The points of an experiment: one CSV file, appended to as it goes.

Runs in: lab.

Invariant: the file holds nothing that differs from run to run (no times, no machine), so that an
experiment that was killed and started again ends with the same bytes as one that was not. Rows of
an arm that has not come to its end are removed before it is trained again, from its beginning.

A row's `settings` is a fingerprint of the arm's plan and task: a folder never holds results of two
settings under one name.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from blake3 import blake3

from volunteer.errors import VolunteerError
from volunteer.files import replace_file, telling_full_disk

POINTS_NAME = "points.csv"
NOTE_SEPARATOR = "; "
_FINGERPRINT_DIGITS = 12


class LabError(VolunteerError):
    """The experiment cannot be run."""


class ResultsError(LabError):
    """The folder's results cannot be used."""

    hint = "choose another folder with --out, or move what is there away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measurement of one arm."""

    experiment: str
    arm: str
    seed: int
    inner_step: int
    """Nominal inner steps done."""
    tokens: int
    """Trained by all workers together."""
    loss: float
    """Held-out, nats per byte; infinite once training broke down."""
    bytes_per_worker: float
    """Sent by each worker since the beginning, on average."""
    notes: str
    """What happened since the last point."""
    is_last: bool
    settings: str
    """Fingerprint of the arm."""


_COLUMNS = tuple(field.name for field in dataclasses.fields(Point))
ArmKey = tuple[str, int]
"""Arm and seed."""


def fingerprint(*parts: object) -> str:
    """Return a short name of settings: dataclasses, structs, strings, numbers and tuples of them.

    Fields that have their default are left out, so that one that is added later changes nothing.
    """
    plain = msgspec.json.encode([_plain(part) for part in parts], order="sorted")
    return blake3(plain).hexdigest()[:_FINGERPRINT_DIGITS]


def _plain(value: object) -> object:
    if isinstance(value, msgspec.Struct):
        defaults = {field.name: field.default for field in msgspec.structs.fields(value)}
        return _without_defaults(value, defaults)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        defaults = {field.name: field.default for field in dataclasses.fields(value)}
        return {"of": type(value).__name__, **_without_defaults(value, defaults)}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value


def _without_defaults(value: object, defaults: Mapping[str, object]) -> dict[str, object]:
    return {
        name: _plain(getattr(value, name))
        for name, default in defaults.items()
        if getattr(value, name) != default
    }


class PointsFile:
    """The CSV file of one experiment's folder."""

    def __init__(self, folder: Path) -> None:
        """Read what is there.

        Raises:
            ResultsError: it is not such a file.
        """
        self._file = folder / POINTS_NAME
        self.points: list[Point] = list(_read(self._file))

    @property
    def finished(self) -> dict[ArmKey, str]:
        """The settings of every arm that has come to its end."""
        return {(point.arm, point.seed): point.settings for point in self.points if point.is_last}

    def drop_unfinished(self) -> tuple[ArmKey, ...]:
        """Remove the rows of arms that were interrupted; return which those are."""
        finished = self.finished
        kept = [point for point in self.points if (point.arm, point.seed) in finished]
        dropped = {(p.arm, p.seed): None for p in self.points if (p.arm, p.seed) not in finished}
        self.points = kept
        text = _format([dict(zip(_COLUMNS, _COLUMNS, strict=True)), *map(_row, kept)])
        if not self._file.exists() or self._file.read_text(encoding="utf-8") != text:
            replace_file(self._file, [text.encode()], mode=0o644)
        return tuple(dropped)

    def append(self, point: Point) -> None:
        """Add a row and hand it to the system.

        Raises:
            StorageFullError: it cannot be written; what there is of it is dropped the next time.
        """
        self.points.append(point)
        with (
            telling_full_disk(self._file),
            self._file.open("a", encoding="utf-8", newline="") as stream,
        ):
            stream.write(_format([_row(point)]))


def _row(point: Point) -> dict[str, str]:
    row = {name: str(getattr(point, name)) for name in _COLUMNS}
    return {**row, "loss": repr(point.loss), "is_last": str(int(point.is_last))}


def _format(rows: Iterable[Mapping[str, str]]) -> str:
    buffer = io.StringIO(newline="")
    csv.DictWriter(buffer, _COLUMNS, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _read(file: Path) -> Iterable[Point]:
    """Parse the file; a last line that a kill cut short is left out.

    Raises:
        ResultsError: it is not such a file.
    """
    if not file.exists():
        return
    text = file.read_bytes().decode("utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(whole, newline=""))
    if whole and tuple(reader.fieldnames or ()) != _COLUMNS:
        raise ResultsError(f"{file}: its columns are not those of an experiment's points")
    for number, row in enumerate(reader, start=2):
        try:
            yield _parse_row(row)
        except (KeyError, ValueError, TypeError) as error:
            raise ResultsError(f"{file}: line {number}: {error}") from error


def _parse_row(row: Mapping[str, str]) -> Point:
    return Point(
        experiment=row["experiment"],
        arm=row["arm"],
        seed=int(row["seed"]),
        inner_step=int(row["inner_step"]),
        tokens=int(row["tokens"]),
        loss=float(row["loss"]),
        bytes_per_worker=float(row["bytes_per_worker"]),
        notes=row["notes"],
        is_last={"0": False, "1": True}[row["is_last"]],
        settings=row["settings"],
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """One number over several seeds."""

    values: tuple[float, ...]
    """By seed, in their order; at least one."""

    @property
    def mean(self) -> float:
        """Arithmetic mean."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation; None of a single value, which tells of none."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


class Outcomes:
    """What the finished arms of an experiment came to, for tables and verdicts."""

    def __init__(self, points: Iterable[Point]) -> None:
        """Look at finished arms alone."""
        listed = list(points)
        self._last = {(point.arm, point.seed): point for point in listed if point.is_last}
        self._all = [point for point in listed if (point.arm, point.seed) in self._last]

    def seeds(self, *arms: str) -> tuple[int, ...]:
        """Return the seeds for which all of `arms` are finished, in order."""
        by_arm = [{seed for name, seed in self._last if name == arm} for arm in arms]
        return tuple(sorted(set.intersection(*by_arm))) if by_arm else ()

    def last(self, arm: str, seed: int) -> Point:
        """Return the last point of a finished arm."""
        return self._last[arm, seed]

    def curve(self, arm: str, seed: int) -> list[Point]:
        """Return all points of a finished arm, in order."""
        return [point for point in self._all if (point.arm, point.seed) == (arm, seed)]

    def loss(self, arm: str) -> Spread | None:
        """Return the final losses of an arm over its seeds; None where none is finished."""
        seeds = self.seeds(arm)
        return Spread(tuple(self.last(arm, s).loss for s in seeds)) if seeds else None

    def excess_percent(self, arm: str, reference: str) -> Spread | None:
        """Return by how much the final loss of `arm` is above that of `reference`, seed by seed."""
        seeds = self.seeds(arm, reference)
        if not seeds:
            return None
        return Spread(
            tuple(
                100.0 * (self.last(arm, s).loss / self.last(reference, s).loss - 1.0) for s in seeds
            )
        )
