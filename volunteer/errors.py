"""Every error of the program, as one tree.

Runs in: every process.

    VolunteerError
    |-- ConfigError
    |-- RunSpecError
    |-- AlreadyRunningError
    |-- CheckpointError
    |   |-- CheckpointCorruptError
    |   `-- CheckpointTooNewError
    |-- TrainerError
    |   |-- OutOfGpuMemoryError
    |   `-- DataUnavailableError
    |-- ContributionRejectedError
    |-- ControlError
    |   `-- NoAgentError
    `-- StorageFullError
        `-- StorageReadOnlyError

A class docstring is the one-line message for the user; `hint` says what to do about it.
"""

from __future__ import annotations


class VolunteerError(Exception):
    """Something went wrong."""

    hint: str = ""
    """What the user can do about it; empty where there is nothing."""
    exit_code: int = 1
    """Exit status of the command line: 1 refused or failed, 2 bad usage, 3 no agent."""

    def __init__(self, message: str = "", *, hint: str | None = None) -> None:
        """Keep the message (default: the class docstring) and the hint."""
        super().__init__(message or (type(self).__doc__ or "").strip())
        if hint is not None:
            self.hint = hint


class ConfigError(VolunteerError):
    """The configuration is not valid."""

    exit_code = 2


class RunSpecError(VolunteerError):
    """The RunSpec is not valid."""

    hint = "mend what is named, in a run of your own; else ask the run's publisher for a valid file"


class AlreadyRunningError(VolunteerError):
    """Another agent already uses this folder."""

    hint = "`allmende status` shows it; ALLMENDE_HOME names another folder for a second volunteer"


class CheckpointError(VolunteerError):
    """The checkpoint cannot be used."""


class CheckpointCorruptError(CheckpointError):
    """The checkpoint is damaged."""

    hint = "the previous one is used; the damaged file is kept in quarantine"


class CheckpointTooNewError(CheckpointError):
    """The checkpoint was written by a newer version."""

    hint = "update with `pipx upgrade allmende`"


class TrainerError(VolunteerError):
    """The trainer cannot go on."""


class OutOfGpuMemoryError(TrainerError):
    """The device has too little free memory."""

    hint = "close other programs that use the GPU, or start with `--device cpu`"


class DataUnavailableError(TrainerError):
    """What the run trains on cannot be had just now."""


class ContributionRejectedError(VolunteerError):
    """A contribution's blob is not valid."""


class ControlError(VolunteerError):
    """The agent did not understand or refused the request."""


class NoAgentError(ControlError):
    """No agent is running."""

    hint = "start one with `allmende start`"
    exit_code = 3


class StorageFullError(VolunteerError):
    """The disk is full."""

    hint = "free some space; nothing that was saved is lost"


class StorageReadOnlyError(StorageFullError):
    """The disk cannot be written to: what waits for room waits for that as well."""

    hint = "the system's log (`dmesg`) says why; nothing that was saved is lost"
