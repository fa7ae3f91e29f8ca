"""`allmende stats --csv`: one row a committed round.

Runs in: the command line.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path

import msgspec

from volunteer.answers import RoundPoint
from volunteer.errors import VolunteerError


def write_rounds(csv_file: Path, points: Iterable[RoundPoint]) -> None:
    """Write the file anew.

    Raises:
        VolunteerError: it could not be written.
    """
    try:
        with csv_file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(RoundPoint.__struct_fields__)
            writer.writerows(msgspec.structs.astuple(point) for point in points)
    except OSError as error:
        raise VolunteerError(f"{csv_file} could not be written: {error.strerror}") from error
