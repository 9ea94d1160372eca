"""The guess that a learner makes before a measurement, and its comparison with what was measured."""

import re

from labsupport.ground.budget import MIB, BudgetError, parse_size
from labsupport.lesson.ledger import current_lab, record
from labsupport.showing.cards import as_html, show_widget

_noted = {}  # question: the guess in MiB that its box took last; running a cell again keeps it
_asked = set()  # questions that were left open once


def _mib(text):
    """A guess such as "460", "2 GB" or "0,5 GiB" in MiB; a bare number is MiB. Raises BudgetError."""
    text = re.sub(r"(?<=[1-9\d]),(?=\d{3}\b)", "", text).replace(",", ".")  # "1,024" is a thousand, "0,5" a half
    return parse_size(f"{text} MiB" if re.fullmatch(r"\s*\d+(\.\d+)?\s*", text) else text) / MIB


class Guess:
    """The learner's guess in MiB; `mib` is what was noted last, 0 if nothing was. See guess()."""

    def __init__(self, question, given):
        import ipywidgets

        self._question = question
        self.mib = given or _noted.get(question, 0.0)
        number = ipywidgets.Text(
            value=f"{self.mib:g}" if self.mib else "",
            description="My guess:",
            placeholder="12, 0.3 GiB or 7 GB",
            continuous_update=False,
            tooltip=question,
            style={"description_width": "initial"},
        )
        number.observe(self._note, "value")
        self._said = ipywidgets.HTML()
        self._say(self._words())
        self.box = ipywidgets.VBox([ipywidgets.HTML(f"<b>{as_html(question)}</b>"), number, self._said])
        show_widget(self.box, f"{question} (run this cell to enter a guess)")

    def _words(self):
        return f"Noted: {self.mib:,.4g} MiB." if self.mib else "Press Enter to note it; a number without a unit is MiB."

    def _say(self, words):
        self._said.value = f'<span role="status">{as_html(words)}</span>'

    def _note(self, change):
        try:
            self.mib = _noted[self._question] = _mib(change["new"])
            self._say(self._words())
        except BudgetError:
            kept = f" {self._words()}" if self.mib else ""
            self._say(f"Not a size: write 12, 0.3 GiB or 7 GB, more than 0.{kept}")

    def against(self, measured_mib):
        """One sentence: the guess beside what was measured. Both go into the learner's ledger.

        A learner who has not guessed is asked once more before the answer is told.
        """
        if not self.mib and self._question not in _asked and current_lab():
            _asked.add(self._question)
            return "You have not guessed yet: type a number into the box above, then run this cell again to see the answer."
        record("guess", question=self._question, guess_mib=self.mib, measured_mib=measured_mib)
        if measured_mib is None:
            return f"You guessed {self.mib:,.0f} MiB; the measured figure is unavailable here."
        if not self.mib:
            return f"No guess was made; measured were {measured_mib:,.1f} MiB."
        return f"You guessed {self.mib:,.0f} MiB; measured were {measured_mib:,.1f} MiB: the guess is {self.mib / measured_mib:.2g} × that."


def guess(question, given=0.0):
    """Ask for a guess with a box. given: the starting value in MiB, a parameter in automatic runs."""
    return Guess(question, given)
