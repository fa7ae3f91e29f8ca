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

from tui import view_state
from volunteer.answers import Status

_T = TypeVar("_T")

PAUSE_FOREVER = 0.0
"""The answer of PauseDialog for a pause that only the owner ends."""

HELP_TEXT = """\
Allmende trains an open model on this machine together with others. The agent does that in the \
background; this is only a view of it.

  p           pause or resume
  q, ctrl+c   close the view; contribution goes on
  Q           stop the agent, then close the view
  s           start the agent, where none runs; again with the same flags
  1 2 3 tab   Dashboard, Peers, Stats
  ctrl+p      all commands, and other colours
  ?           this help; escape closes it

Held-out loss: how badly the shared model guesses text it was never trained on, in nats per byte. \
Down is good.
Done here: tokens this machine has trained on.
Confirmed: the part that the swarm has put into the shared model for good.
Weights: whether a peer has the same shared model as this machine at this moment.

Without the view: allmende status, pause, resume, stop, stats, peers.
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


class PauseDialog(_Dialog[float]):
    """Asks for how long; answers in seconds, PAUSE_FOREVER, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("p,enter", f"answer({PAUSE_FOREVER})", "Pause"),
        Binding("1", "answer(3600.0)", "1 hour"),
        Binding("2", "answer(7200.0)", "2 hours"),
        Binding("8", "answer(28800.0)", "8 hours"),
        Binding("escape", "cancel", "Cancel"),
    ]

    def __init__(self, status: Status | None) -> None:
        """Say what a pause costs now."""
        cost = "\n".join(view_state.pause_cost(status))
        keys = (
            "  p, Enter  pause until you resume\n"
            "  1, 2, 8   pause for so many hours\n"
            "  Escape    do not pause"
        )
        super().__init__("Pause?", f"{cost}\n\n{keys}", keys="p: pause  Esc: go on")


class StopDialog(_Dialog[bool]):
    """Asks once before the agent is stopped; answers True or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("Q,y,enter", "answer(True)", "Stop"),
        Binding("escape,n", "cancel", "Cancel"),
    ]

    def __init__(self) -> None:
        """Say what stopping means."""
        super().__init__(
            "Stop the agent?",
            "This machine stops contributing until you start it again.\n"
            "What it has trained is saved first, and goes out after the next start.\n\n"
            "  Q, y or Enter   stop it and close the view\n"
            "  Escape          go on",
            keys="Q: stop  Esc: go on",
        )


class HelpDialog(_Dialog[None]):
    """Keys and words."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,f1", "cancel", "Close"),
    ]

    def __init__(self) -> None:
        """Show the help."""
        super().__init__("Help", HELP_TEXT, keys="Esc: close")
