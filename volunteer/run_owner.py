"""Whose run it is: that the publisher it names has signed it, and what others' may not do here.

Runs in: agent, and the command line, which says so before anything is started.
"""

from __future__ import annotations

from p2p.identity import verify_signature
from volunteer.config import Config
from volunteer.data.sources import sources_on_disk
from volunteer.errors import RunSpecError
from volunteer.run import RunSpec, signed_bytes


def verify_publisher(spec: RunSpec, *, source: str) -> None:
    """Check that a spec which names a publisher is signed by it.

    Raises:
        RunSpecError: it is not.
    """
    if not spec.publisher:
        return
    signature = bytes.fromhex(spec.signature)
    if not verify_signature(spec.publisher, signed_bytes(spec), signature):
        raise RunSpecError(
            f"{source}: the signature is not that of {spec.publisher} for what the file says now",
            hint="if the run is yours, sign it again (`allmende publish FILE`);"
            " else take the publisher's file, unchanged",
        )


def verify_round_length(spec: RunSpec, round_s: float | None, *, source: str) -> None:
    """Check that no other round length than the publisher's is asked for.

    Raises:
        RunSpecError: it is.
    """
    if spec.publisher and round_s is not None:
        raise RunSpecError(
            f"{source}: the round length of a published run is its publisher's",
            hint="leave --round-s away, or use a RunSpec without a publisher",
        )


def verify_sources(spec: RunSpec, config: Config, me: str) -> None:
    """Check that a stranger's run does not read files of this machine unasked.

    What is trained on goes into weights that everyone gets. A RunSpec that is signed by oneself is
    one's own. One that nobody has signed may come from anywhere, though it was given on the command
    line: the owner may have been told of a run, and nothing of what it reads.

    Args:
        spec: the run; its signature has been checked.
        config: the owner's wishes.
        me: own peer id; empty where there is none yet.

    Raises:
        RunSpecError: it does, and the config does not allow it.
    """
    named = sources_on_disk(spec.data.sources)
    is_own = bool(spec.publisher) and spec.publisher == me
    if named and not is_own and not config.allow_file_sources:
        whose = "is a stranger's" if spec.publisher else "is signed by nobody"
        raise RunSpecError(
            f"run {spec.name} {whose} and would read {', '.join(named)} on this machine:"
            " what is in there could be read out of the weights",
            hint="if it is a run of your own, `allmende publish FILE` signs it as yours; to allow"
            " this to all runs, `allmende config set allow_file_sources true`",
        )
