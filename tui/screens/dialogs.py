"""Questions and help in front of the main screen.

Runs in: tui. Every dialog says what follows before it is answered, and Escape always means no.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui import pause_words
from volunteer.answers import Status

_T = TypeVar("_T")

PAUSES: dict[str, tuple[str, dict[str, float]]] = {
    "now": ("pause", {}),
    "finish": ("pause", {"finish": True}),
    "30 min": ("pause", {"for_s": 1800.0}),
    "1 h": ("pause", {"for_s": 3600.0}),
    "2 h": ("pause", {"for_s": 7200.0}),
    "8 h": ("pause", {"for_s": 28800.0}),
    "resume": ("resume", {}),
}
"""What PauseDialog's answers ask of the agent: verb and arguments."""

HELP_TEXT = """\
Allmende trains an open model on this machine together with others. The agent does that in the \
background; this is only a view of it.

  p           pause or resume; p twice pauses at once
  f           finish this round, then pause
  z           snooze: pause for a while
  q, ctrl+c   close the view; contribution goes on
  Q           stop the agent, then close the view
  s           start the agent where none runs, with the flags it had
  1 2 3 tab   Dashboard, Peers, Stats
  ctrl+p      all commands, and other colours
  ?           this help; escape closes it

Held-out loss: how badly the shared model guesses text it was never trained on, in nats per byte. \
Down is good.
Done here: tokens this machine has trained on.
Confirmed: the part that the swarm has put into the shared model for good.
Weights: whether a peer has the same shared model as this machine at this moment.

Without the view: allmende status, pause, resume, stop, stats, peers, doctor.
TEXTUAL_THEME=textual-light or ansi-light changes the colours, NO_COLOR=1 takes them away."""


class _Dialog(ModalScreen[_T]):
    """A framed text."""

    def __init__(self, title: str, text: str, *, keys: str) -> None:
        """Show `text` below `title`, and above `keys`, which no window is too small for."""
        super().__init__()
        self._title_text = title
        self._text = text
        self._keys = keys

    def compose(self) -> ComposeResult:
        """Lay out the widgets."""
        with VerticalScroll(id="dialog") as box:
            box.border_title = self._title_text
            box.border_subtitle = self._keys
            yield Static(self._text, markup=False)

    def action_answer(self, answer: _T) -> None:
        """Close with `answer`."""
        self.dismiss(answer)

    def action_cancel(self) -> None:
        """Close without an answer."""
        self.dismiss(None)


class PauseDialog(_Dialog[str]):
    """Asks when and for how long; answers with a key of PAUSES, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p,enter", "answer('now')", "Pause"),
        Binding("f", "answer('finish')", "Finish"),
        Binding("h", "answer('30 min')", "30 minutes"),
        Binding("1", "answer('1 h')", "1 hour"),
        Binding("2", "answer('2 h')", "2 hours"),
        Binding("8", "answer('8 h')", "8 hours"),
        Binding("r", "answer('resume')", "Go on"),
        Binding("escape", "cancel", "Cancel"),
    ]

    def __init__(self, status: Status | None) -> None:
        """Say what a pause costs now."""
        cost = "\n".join(pause_words.pause_cost(status))
        is_finishing = status is not None and status.finishes_round is not None
        finish = (
            "  r         do not pause after this round: go on"
            if is_finishing
            else "  f         finish this round, then pause: it is not missed"
        )
        keys = (
            "  p, Enter  pause now, until you resume\n"
            f"{finish}\n"
            "  h         snooze for half an hour\n"
            "  1, 2, 8   snooze for so many hours\n"
            "  Escape    do not pause"
        )
        super().__init__("Pause?", f"{cost}\n\n{keys}", keys="p: now  f: finish  Esc: no")


class StopDialog(_Dialog[str]):
    """Asks once before the agent is stopped; answers `now`, `finish` or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("Q,y,enter", "answer('now')", "Stop"),
        Binding("f", "answer('finish')", "Finish"),
        Binding("escape,n", "cancel", "Cancel"),
    ]

    def __init__(self, status: Status | None) -> None:
        """Say what stopping means."""
        is_training = status is not None and pause_words.is_training(status)
        cost = f"{pause_words.round_left(status)}.\n" if status and is_training else ""
        can_finish = status is None or is_training
        finish = "  f               finish this round, then stop it\n" if can_finish else ""
        super().__init__(
            "Stop the agent?",
            f"{cost}This machine stops contributing until you start it again.\n"
            "What it has trained is saved first, and goes out after the next start.\n\n"
            "  Q, y or Enter   stop it and close the view\n"
            f"{finish}"
            "  Escape          go on",
            keys="Q: stop  f: finish  Esc: no" if can_finish else "Q: stop  Esc: no",
        )


class HelpDialog(_Dialog[None]):
    """Keys and words."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1", "cancel", "Close"),
    ]

    def __init__(self) -> None:
        """Show the help."""
        super().__init__("Help", HELP_TEXT, keys="Esc: close")
