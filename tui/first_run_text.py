"""The words of the first run: what would be used, sent and stored, and the one question.

Runs in: tui and command line. Pure.
"""

from __future__ import annotations

import textwrap

from tui.wording import clean
from volunteer.first_run import Plan, When, plan_rows, when_sentences

_LABEL_WIDTH = 10
_NARROW = 60
TITLE = "Before it runs for the first time"
GREETING = "Nothing runs yet. What would run here, and what would leave this machine:"
LATER = (
    "It stops the moment you need the machine; p pauses it, `allmende stop` ends it. `allmende"
    " config get` shows every setting: device, threads, hours, limits. `allmende doctor` checks"
    " this machine."
)


def told(plan: Plan, width: int) -> list[str]:
    """Return what is used, sent and stored, folded into `width` columns."""
    lines = [*_fold(GREETING, width), ""]
    for label, sentence in plan_rows(plan):
        lines += _row(label, clean(sentence), width)
    return lines


def choices(when: When, width: int) -> list[str]:
    """Return the question with its answers, the chosen one marked."""
    lines = ["When should it run?"]
    for number, (answer, sentence) in enumerate(when_sentences().items(), 1):
        mark = "(x)" if answer == when else "( )"
        lines += _fold(sentence, width, head=f" {mark} {number}  ")
    return lines


def later(width: int) -> list[str]:
    """Return what can be done afterwards."""
    return _fold(LATER, width)


def _row(label: str, sentence: str, width: int) -> list[str]:
    if width < _NARROW:
        return [label, *_fold(sentence, width, head="  ")]
    return _fold(sentence, width, head=label.ljust(_LABEL_WIDTH))


def _fold(text: str, width: int, head: str = "") -> list[str]:
    return textwrap.wrap(
        text,
        max(20, width),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )
