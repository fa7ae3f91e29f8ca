"""`allmende sample`: asks the agent for text, and shows it without what a terminal would obey.

Runs in: the command line.
"""

from __future__ import annotations

import unicodedata

from tui.client import ControlClient
from volunteer.answers import Sample
from volunteer.errors import VolunteerError
from volunteer.locations import Locations
from volunteer.messages import MAX_PROMPT_CHARS

_DEADLINE_S = 75.0
# Above the agent's own (volunteer/agent/sampling.py), so that it is the agent that says why.


def ask_sample(
    locations: Locations, prompt: str, max_tokens: int, temperature: float, seed: int | None
) -> Sample:
    """Have the agent write.

    Raises:
        VolunteerError: the prompt is too long, or no text at all.
        ControlError: no agent runs, or it refuses.
    """
    if len(prompt) > MAX_PROMPT_CHARS:
        raise _bad_prompt(f"the prompt has more than {MAX_PROMPT_CHARS} characters")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # how Python passes on arguments that are not text
        raise _bad_prompt("the prompt is not UTF-8") from error
    args = {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        args["seed"] = seed
    with ControlClient(locations.control_socket, deadline_s=_DEADLINE_S) as client:
        return client.request("sample", Sample, args)


def sample_text(prompt: str, written: Sample) -> str:
    """Return prompt and text as they are shown: lines stay lines, control characters go.

    The model learnt from strangers' weights; what it writes must not be able to steer a terminal.
    """
    return "".join(_visible(c) for c in prompt + written.text)


def _visible(char: str) -> str:
    is_control = unicodedata.category(char)[0] == "C" and char not in "\n\t"
    return "\N{REPLACEMENT CHARACTER}" if is_control else char


def _bad_prompt(message: str) -> VolunteerError:
    error = VolunteerError(message)
    error.exit_code = 2
    return error
