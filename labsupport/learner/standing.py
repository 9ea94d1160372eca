"""What the ledger says about its learner, shown: labs, exercises and verdicts, and guesses beside measurements."""

import pandas as pd
from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure

from labsupport.learner.tally import first_guesses, standing, tendency
from labsupport.lesson.catalogue import labs
from labsupport.lesson.ledger import LedgerError, entries, ledger_path
from labsupport.showing.cards import as_html, template
from labsupport.showing.palette import COLOURS, FAINT, FIGURES, INK, OUTLINE
from labsupport.showing.plain import plain, say
from labsupport.showing.words import bundle

FARTHEST = 1024  # the factor at which a picture ends; typing bytes in place of MiB shall not squeeze the rest
NEAREST = 4  # the factor that a picture shows at least, or close guesses would look far off

_PROGRESS = template(
    """\
<p>{{ summary }}</p>
<table><thead><tr><th></th><th style="text-align:left">lab</th><th>exercises passed</th><th>verdicts seen</th><th>guess ÷ measured</th></tr></thead><tbody>
{% for row in rows %}
<tr><th>{{ row[0].number }}</th><td style="text-align:left"><a href="{{ row[0].name }}.ipynb">{{ row[0].title }}</a></td>
{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody></table>"""
)


def _load():
    """(entries, a sentence about the ledger itself, or "")."""
    try:
        path, (kept, damaged) = ledger_path(), entries()
    except LedgerError as error:
        return [], f"Nothing can be shown: {error}."
    if path is None:
        return [], "Nothing is kept: LABSUPPORT_LEDGER is set to off."
    return kept, f"{damaged} damaged line{'s' * (damaged > 1)} of {path} left out." if damaged else ""


class _Shown:
    """Shown in a notebook as its picture, table and sentence; printed, as text. `nothing`: what an empty one says."""

    def __str__(self):
        return (self.note or self.nothing) if self.empty else self.text()

    def _ipython_display_(self):
        from IPython.display import HTML, display

        if self.empty:
            say(plain(str(self)))
            return
        data, metadata = bundle(self.figure(), str(self))
        display(data, metadata=metadata, raw=True)
        display(HTML(self.html()))


class Progress(_Shown):
    """Labs visited, exercises passed, verdicts seen. See progress()."""

    nothing = "Nothing yet. Labs that you work through in JupyterLab show up here, the next time you run this cell."

    def __init__(self):
        kept, self.note = _load()
        self._standing = standing(kept)
        self._guesses = {guess.lab: guess for guess in first_guesses(kept)}
        self.empty = not self._standing

    def _rows(self):
        """(lab, exercises passed, verdicts seen, guess over measurement) of every lab visited, as text behind the lab."""
        for lab in filter(self._standing.get, labs().values()):
            (passed, seen), guess = self._standing[lab], self._guesses.get(lab)
            factor = "–" if guess is None else f"{guess.factor:.2g}"
            yield lab, f"{len(passed)} of {len(lab.exercises)}", f"{len(seen)} of {len(lab.claims)}", factor

    @property
    def frame(self):
        """The same, a row a lab."""
        columns = ["title", "exercises passed", "verdicts seen", "guess ÷ measured"]
        rows = {lab.number: [lab.title, *cells] for lab, *cells in self._rows()}
        return pd.DataFrame.from_dict(rows, orient="index", columns=columns)

    @property
    def summary(self):
        every = labs().values()
        exercises, claims = sum(len(lab.exercises) for lab in every), sum(len(lab.claims) for lab in every)
        passed, seen = (sum(len(parts[which]) for parts in self._standing.values()) for which in (0, 1))
        visited = f"{len(self._standing)} of {len(every)} labs visited"
        return f"{visited}, {passed} of {exercises} exercises passed, {seen} of {claims} verdicts seen. {self.note}".strip()

    def html(self):
        return _PROGRESS.render(summary=self.summary, rows=self._rows())

    def figure(self):
        """A row a lab: what there is to do as outlines, what is done filled in."""
        every = list(labs().values())
        most = [max(len(lab.exercises) for lab in every), max(len(lab.claims) for lab in every)]
        with rc_context(FIGURES):
            figure = Figure(figsize=(9, 0.26 * len(every) + 0.8))
            left, right = figure.subplots(1, 2, sharey=True, width_ratios=most)
        for row, lab in enumerate(every):
            passed, seen = self._standing.get(lab, ((), ()))
            _boxes(left, row, lab.exercises, passed, COLOURS[2])
            _boxes(right, row, lab.claims, seen, COLOURS[1])
        for axes, title in ((left, "exercises passed"), (right, "verdicts seen")):
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xticks([])
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
            axes.grid(False)
        left.set_yticks(range(len(every)), [lab.name.replace("_", " ") for lab in every])
        for label, lab in zip(left.get_yticklabels(), every):
            label.set_color(INK if lab in self._standing else FAINT)
        left.set_ylim(len(every) - 0.4, -0.6)
        return figure

    def text(self):
        return f"{self.summary}\n{self.frame.to_string()}"


def _boxes(axes, row, parts, done, colour):
    """A box for each part of a lab, filled in if it is done."""
    for place, part in enumerate(parts):
        fill, edge = (colour, colour) if part in done else ("none", OUTLINE)
        axes.barh(row, 0.86, 0.7, place, color=fill, edgecolor=edge)


class Guesses(_Shown):
    """Each lab's first guess beside what was measured. See guesses()."""

    nothing = (
        "No guesses yet. Put a number into a lab's box before you run the lab, and you see here how close you came."
    )

    def __init__(self):
        kept, self.note = _load()
        self.found = first_guesses(kept)
        self.empty = not self.found

    def figure(self):
        """Guess over measurement in order of time; equal factors too high and too low are equally far from the line."""
        with rc_context(FIGURES):
            figure = Figure(figsize=(9, 3.2))
            axes = figure.subplots()
        draw_factors(axes, [(place, guess.factor, guess.late) for place, guess in enumerate(self.found)])
        axes.set_xticks(range(len(self.found)), [guess.lab.number for guess in self.found])
        axes.set_xlabel("lab, in the order in which you guessed")
        axes.set_xlim(-0.6, max(len(self.found), 6) - 0.4)  # two guesses shall not stand at the edges
        return figure

    @property
    def sentence(self):
        sentences = [tendency(self.found), self.note]
        if late := ", ".join(guess.lab.number for guess in self.found if guess.late):
            sentences.insert(
                1, f"Hollow, and not counted: lab {late}, where the answer was on the page before the guess."
            )
        return " ".join(sentences).strip()

    def html(self):
        return f"<p>{as_html(self.sentence)}</p>"

    def text(self):
        words = "lab {0.lab.number}: guessed {0.guess:,.0f} MiB, measured {0.measured:,.1f} MiB, {0.factor:.2f} ×{1}"
        rows = [words.format(guess, " (late)" * guess.late) for guess in self.found]
        return "\n".join([*rows, self.sentence])


def draw_factors(axes, points):
    """Draw (place, factor, hollow) on a logarithmic axis around 1 ×, the measurement. A triangle points to what lies beyond."""
    reach = 1.3 * min(max(NEAREST, *(max(factor, 1 / factor) for _, factor, _ in points)), FARTHEST)
    for place, factor, hollow in points:
        marker = "^" if factor > FARTHEST else "v" if factor < 1 / FARTHEST else "o"
        factor = min(max(factor, 1 / FARTHEST), FARTHEST)
        axes.plot([place, place], [1, factor], color=OUTLINE, lw=1, zorder=1)
        inside = "none" if hollow else COLOURS[1]
        axes.plot(place, factor, marker, ms=8, mec=rcParams["axes.edgecolor"], mfc=inside, zorder=3)
    axes.axhline(1, color=COLOURS[2], zorder=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(1 / reach, reach)
    steps = [2.0**step for step in range(1, 11) if 2.0**step <= reach]
    every = -(-len(steps) // 3)  # three ticks on each side
    ticks = {1: "as measured"}
    for step in steps[every - 1 :: every]:
        ticks |= {1 / step: f"{step:,.0f} × too low", step: f"{step:,.0f} × too high"}
    axes.set_yticks(list(ticks), ticks.values())
    axes.minorticks_off()
    axes.grid(False, axis="x")


def progress():
    """What you have done so far, by lab: from the ledger on this machine (see labsupport/lesson/ledger.py)."""
    return Progress()


def guesses():
    """Your first guess of each lab beside what was measured, and whether the guesses get closer."""
    return Guesses()
