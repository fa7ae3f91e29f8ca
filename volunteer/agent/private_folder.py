"""Whether a run's `private:` source means anything on this machine, for the owner to know.

Runs in: agent. The trainer leaves out what is not there; here is said that it does, and what mends
it. The folder itself is not named: who asks for the status need not be its owner.
"""

from __future__ import annotations

from pathlib import Path

import trio

from volunteer.data.sources import parse_source
from volunteer.local_data import SET_PRIVATE_DATA
from volunteer.run import RunSpec
from volunteer.training.sources.files import has_text

LOOK_EVERY_S = 60.0
_MENDS = f"`{SET_PRIVATE_DATA}`, then start the agent anew."
NOT_SET = f"`private:` is left out, since no folder is set: {_MENDS}"
NOT_THERE = f"`private:` is left out, since the folder of `private_data` is not there: {_MENDS}"
NO_TEXT = f"`private:` is left out, since there is no text in its folder: {_MENDS}"


def private_note(spec: RunSpec, private_dir: str) -> str:
    """Return what is wrong with the private folder of a run; empty where nothing is.

    Args:
        spec: the run.
        private_dir: as in the settings.
    """
    if all(parse_source(text).is_public for text in spec.data.sources):
        return ""
    if not private_dir:
        return NOT_SET
    folder = Path(private_dir).expanduser()
    if not folder.is_dir():
        return NOT_THERE
    return "" if has_text(folder) else NO_TEXT


class PrivateFolder:
    """Looks now and then: drives come and go."""

    def __init__(self, spec: RunSpec, private_dir: str) -> None:
        """Look at nothing yet; as for `private_note`."""
        self._spec = spec
        self._private_dir = private_dir
        self.note = ""
        """As `private_note` last had it."""

    async def run(self) -> None:
        """Look in a thread, for ever: a folder of the network may hang."""
        while True:
            self.note = await trio.to_thread.run_sync(
                private_note,
                self._spec,
                self._private_dir,
                abandon_on_cancel=True,  # type: ignore[call-arg]  # the stubs know an older trio
            )
            await trio.sleep(LOOK_EVERY_S)  # noqa: TID251 - a period
