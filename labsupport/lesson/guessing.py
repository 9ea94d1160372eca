"""The guess that a learner makes before a measurement, and its comparison with what was measured."""

from labsupport.lesson.ledger import record
from labsupport.showing.cards import as_html, show_widget


class Guess:
    """The learner's guess in MiB; `mib` is what the box says now. See guess()."""

    def __init__(self, question, given):
        import ipywidgets

        self._question = question
        style = {"description_width": "initial"}
        self._box = ipywidgets.FloatText(value=given, description="My guess (MiB):", style=style)
        show_widget(
            ipywidgets.VBox([ipywidgets.HTML(f"<b>{as_html(question)}</b>"), self._box]),
            f"{question} (run this cell to enter a guess)",
        )

    @property
    def mib(self):
        return self._box.value

    def against(self, measured_mib):
        """One sentence: the guess beside what was measured. Both go into the learner's ledger."""
        record("guess", question=self._question, guess_mib=self.mib, measured_mib=measured_mib)
        if measured_mib is None:
            return f"You guessed {self.mib:,.0f} MiB; the measured figure is unavailable here."
        if not self.mib:
            return f"No guess was made; measured were {measured_mib:,.1f} MiB."
        return f"You guessed {self.mib:,.0f} MiB; measured were {measured_mib:,.1f} MiB: the guess is {self.mib / measured_mib:.2f} × that."


def guess(question, given=0.0):
    """Ask for a guess in MiB with a number box. given: the starting value, a parameter in automatic runs."""
    return Guess(question, given)
