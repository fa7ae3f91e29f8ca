"""Where streams are: what becomes of a file of positions that cannot be read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.volunteer.training.test_feed import feed_of, read
from tests.volunteer.training.test_stream import ListDataset, shards
from tests.volunteer.training.texts import run_on

LOST = "positions lost"


def test_damaged_positions_are_told_and_the_stream_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    dataset, spec = ListDataset(shards(2, 30)), run_on("hf:a/x")
    feed = feed_of(spec, tmp_path, dataset)
    feed.restore(0)
    due = read(feed, range(2))
    feed.save(2)
    feed.close()
    assert LOST not in caplog.text, "no file is not a damaged one"
    (positions_file,) = tmp_path.rglob("positions*.json")
    positions_file.write_bytes(positions_file.read_bytes()[:-9])
    again = feed_of(spec, tmp_path, dataset)
    again.restore(2)
    assert LOST in caplog.text
    assert read(again, range(2)) == due
    again.close()
