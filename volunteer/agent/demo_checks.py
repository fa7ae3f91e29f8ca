"""Why a demo's run cannot train, told as soon as it is known: nobody else brings what is missing.

Runs in: demo. Pure, but for the looks at this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import psutil

from p2p.blobstore import blob_id_of_file
from volunteer.agent.joined_run import verify_hardware
from volunteer.agent.run_data import TOKENIZER_NAME
from volunteer.answers import Status
from volunteer.errors import RunSpecError, VolunteerError
from volunteer.policy.sensors.disk import read_free_bytes
from volunteer.run import RunSpec

PATIENCE_S = 35.0
"""From the first trouble on, if nobody has trained since: what failed is tried again after 30."""
_HELD = ("waiting", "paused")


def verify_can_train(spec: RunSpec, beside: Path | None, folder: Path) -> None:
    """Check what can be known before an agent is started.

    Args:
        spec: the run.
        beside: the folder of its RunSpec file; None: it comes with the package.
        folder: where the demo's data will lie.

    Raises:
        RunSpecError: this machine is too small, or the tokenizer is not there, or another one.
    """
    verify_hardware(spec, psutil.virtual_memory().total, read_free_bytes(folder))
    blob_id = spec.data.tokenizer_hash
    if not blob_id or beside is None:
        return
    file = beside / TOKENIZER_NAME
    if not file.is_file():
        raise RunSpecError(
            f"run {spec.name} needs its tokenizer, and {file} is not there",
            hint="put it there: in a demo there is nobody to fetch it from",
        )
    if blob_id_of_file(file) != blob_id:
        raise RunSpecError(
            f"{file} is not the tokenizer of run {spec.name}: its hash is another",
            hint="put the right file there, or write its hash into the RunSpec",
        )


class Hindrance:
    """Watches whether anybody trains, and what keeps them from it."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._since_s: float | None = None
        self._told = ""

    @property
    def is_told(self) -> bool:
        """Whether something keeps all of them from training, as far as is known."""
        return bool(self._told)

    def look(self, statuses: Sequence[Status], now_s: float) -> str:
        """Return what is to be told now: what keeps all of them from training, if that is news.

        Raises:
            VolunteerError: nobody has trained for `PATIENCE_S` since the first trouble.
        """
        if any(status.state == "contributing" for status in statuses):
            self._since_s, self._told = None, ""
            return ""
        if not all(status.state in _HELD for status in statuses):
            return ""  # some are starting or catching up, which may take its time
        reason = statuses[0].reason
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= PATIENCE_S:
            raise VolunteerError(
                f"this run cannot train here: {reason}",
                hint="mend that and try again; with `--keep DIR` the logs stay",
            )
        if reason == self._told:
            return ""
        self._told = reason
        return f"nobody trains: {reason}"


def last_words(log_file: Path) -> str:
    """Return the last line of a log, without its time; empty where there is none."""
    try:
        lines = log_file.read_text("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    last = next((line for line in reversed(lines) if line.strip()), "")
    _, level, words = last.partition(" ERROR ")
    return words.strip() if level else last.strip()
