"""What the ledger says about its learner: labs, exercises and verdicts, and guesses beside measurements, as pictures."""

import math
from dataclasses import dataclass

import pandas as pd
from matplotlib import rcParams
from matplotlib.figure import Figure

from labsupport.learner.guide import labs, link
from labsupport.lesson.ledger import LedgerError, entries, ledger_path
from labsupport.showing.palette import COLOURS
from labsupport.showing.words import bundle

FEW = 4  # guesses, below which no tendency is told
REAL = (1e-6, 1e9)  # MiB; a guess beyond is none
FARTHEST = 1024  # the factor at which a picture ends; typing bytes in place of MiB shall not squeeze the rest


@dataclass(frozen=True)
class FirstGuess:
    """The first guess other than 0 of one lab, in MiB. late: made after a run without a guess had shown the answer."""

    lab: str
    guess: float
    measured: float
    late: bool

    @property
    def factor(self):
        """Guess over measurement: 0.5 is half of it, 2 is twice."""
        return self.guess / self.measured


def _lab(entry):
    """The lab that an entry belongs to; None for a notebook of the learner's own."""
    lab = labs().get(entry["lab"][:2])
    return lab if lab and lab.name == entry["lab"] else None


def first_guesses(kept):
    """The guess of each lab that counts, in order of time. A learner who runs a lab again knows the answer by then."""
    found, shown = {}, set()
    for entry in kept:
        lab, guess, measured = _lab(entry), entry.get("guess_mib"), entry.get("measured_mib")
        if not lab or entry["kind"] != "guess" or not measured or not REAL[0] < measured < REAL[1]:
            continue
        if REAL[0] < guess < REAL[1] and lab.number not in found:
            found[lab.number] = FirstGuess(lab.number, guess, measured, lab.number in shown)
        shown.add(lab.number)
    return list(found.values())


def standing(kept):
    """{lab's number: (numbers of the exercises passed, claims whose verdict was seen)} for each lab that has an entry."""
    found = {}
    for entry in kept:
        if lab := _lab(entry):
            passed, seen = found.setdefault(lab.number, (set(), set()))
            if entry["kind"] == "exercise" and entry["passed"] and entry["number"] in lab.exercises:
                passed.add(entry["number"])
            if entry["kind"] == "verdict" and entry["id"] in lab.claims:
                seen.add(entry["id"])
    return found


def off_by(factors):
    """The typical factor between guesses and measurements, whichever is larger: the geometric mean, at least 1."""
    return math.exp(sum(abs(math.log(factor)) for factor in factors) / len(factors))


def tendency(found):
    """One sentence on whether guesses get closer: the first half of them against the second, those made too late left out."""
    factors = [guess.factor for guess in found if not guess.late]
    if len(factors) < FEW:
        return f"Too few guesses yet to tell whether they get closer: {len(factors)}, and it takes {FEW}."
    half = len(factors) // 2
    first, lately = off_by(factors[:half]), off_by(factors[-half:])
    change = "got closer" if lately < 0.9 * first else "got farther off" if first < 0.9 * lately else "stayed about as close"
    return f"Your guesses {change}: off by a factor of {first:.1f} at first, {lately:.1f} lately (the first {half} guesses against the last {half})."


def _load():
    """(entries, a sentence about the ledger itself, or "")."""
    if ledger_path() is None:
        return [], "Nothing is kept: LABSUPPORT_LEDGER is set to off."
    try:
        kept, damaged = entries()
    except LedgerError as error:
        return [], f"Nothing can be shown: {error}."
    return kept, f"{damaged} damaged line{'s' * (damaged > 1)} of {ledger_path()} left out." if damaged else ""


class _Shown:
    """Shown in a notebook as its picture, table and sentence; printed, as text."""

    def _ipython_display_(self):
        from IPython.display import HTML, display

        if self.empty:
            print(self)
            return
        data, metadata = bundle(self.figure(), str(self))
        display(data, metadata=metadata, raw=True)
        display(HTML(self.html()))


class Progress(_Shown):
    """Labs visited, exercises passed, verdicts seen. See progress()."""

    def __init__(self):
        kept, self.note = _load()
        self._standing = standing(kept)
        self._guesses = {guess.lab: guess for guess in first_guesses(kept)}
        self.empty = not self._standing

    @property
    def frame(self):
        rows = {}
        for number, (passed, seen) in sorted(self._standing.items()):
            lab, guess = labs()[number], self._guesses.get(number)
            rows[number] = {
                "title": lab.title,
                "exercises passed": f"{len(passed)} of {len(lab.exercises)}",
                "verdicts seen": f"{len(seen)} of {len(lab.claims)}",
                "guess ÷ measured": "–" if guess is None else f"{guess.factor:.2g}",
            }
        return pd.DataFrame.from_dict(rows, orient="index")

    @property
    def summary(self):
        every = labs().values()
        passed, seen = (sum(len(parts[which]) for parts in self._standing.values()) for which in (0, 1))
        return (
            f"{len(self._standing)} of {len(every)} labs visited, {passed} of {sum(len(lab.exercises) for lab in every)} exercises passed, "
            f"{seen} of {sum(len(lab.claims) for lab in every)} verdicts seen. {self.note}"
        ).strip()

    def html(self):
        frame = self.frame.assign(title=[f'<div style="text-align:left">{link(labs()[number], labs()[number].title)}</div>' for number in self.frame.index])
        return f"<p>{self.summary}</p>" + frame.rename(columns={"title": "lab"}).to_html(border=0, escape=False)

    def figure(self):
        """A row a lab: what there is to do as outlines, what is done filled in."""
        every = list(labs().values())
        figure = Figure(figsize=(9, 0.26 * len(every) + 0.8), layout="constrained", facecolor="white")
        axes = figure.subplots(1, 2, sharey=True, width_ratios=[max(len(lab.exercises) for lab in every), max(len(lab.claims) for lab in every)])
        for side, which, title, colour in ((axes[0], 0, "exercises passed", COLOURS[2]), (axes[1], 1, "verdicts seen", COLOURS[1])):
            for row, lab in enumerate(every):
                all_of_it, done = (lab.exercises, lab.claims)[which], self._standing.get(lab.number, ((), ()))[which]
                for place, part in enumerate(all_of_it):
                    side.barh(row, 0.86, 0.7, place, color=colour if part in done else "none", edgecolor=colour if part in done else "#999999")
            side.set_title(title, loc="left", fontsize=10)
            side.set_xticks([])
            side.spines[:].set_visible(False)
            side.tick_params(length=0)
        axes[0].set_yticks(range(len(every)), [lab.name.replace("_", " ") for lab in every])
        for label, lab in zip(axes[0].get_yticklabels(), every):
            label.set_color("black" if lab.number in self._standing else "#6b6b6b")
        axes[0].set_ylim(len(every) - 0.4, -0.6)
        return figure

    def __str__(self):
        if self.empty:
            return self.note or "Nothing yet. Labs that you work through in JupyterLab show up here, the next time you run this cell."
        return f"{self.summary}\n{self.frame.to_string()}"


class Guesses(_Shown):
    """Each lab's first guess beside what was measured. See guesses()."""

    def __init__(self):
        kept, self.note = _load()
        self.found = first_guesses(kept)
        self.empty = not self.found

    def figure(self):
        """Guess over measurement in order of time; equal factors too high and too low are equally far from the line."""
        figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
        axes = figure.subplots()
        factors_figure(axes, [(place, guess.factor, guess.late) for place, guess in enumerate(self.found)])
        axes.set_xticks(range(len(self.found)), [guess.lab for guess in self.found])
        axes.set_xlabel("lab, in the order in which you guessed")
        axes.set_xlim(-0.6, max(len(self.found), 6) - 0.4)
        return figure

    @property
    def sentence(self):
        late = [guess.lab for guess in self.found if guess.late]
        hollow = f" Hollow, and not counted: lab {', '.join(late)}, where the answer was on the page before the guess." if late else ""
        return f"{tendency(self.found)}{hollow} {self.note}".strip()

    def html(self):
        return f"<p>{self.sentence}</p>"

    def __str__(self):
        if self.empty:
            return self.note or "No guesses yet. Put a number into a lab's box before you run the lab, and you see here how close you came."
        rows = [f"lab {g.lab}: guessed {g.guess:,.0f} MiB, measured {g.measured:,.1f} MiB, {g.factor:.2f} ×{' (late)' * g.late}" for g in self.found]
        return "\n".join([*rows, self.sentence])


def factors_figure(axes, points):
    """Draw (place, factor, hollow) on a logarithmic axis around 1 ×, the measurement. A triangle points to what lies beyond."""
    reach = 1.3 * min(max(4, *(max(factor, 1 / factor) for _, factor, _ in points)), FARTHEST)
    for place, factor, hollow in points:
        marker = "^" if factor > FARTHEST else "v" if factor < 1 / FARTHEST else "o"
        factor = min(max(factor, 1 / FARTHEST), FARTHEST)
        axes.plot([place, place], [1, factor], color="#999999", lw=1, zorder=1)
        axes.plot(place, factor, marker, ms=8, mec=rcParams["axes.edgecolor"], mfc="none" if hollow else COLOURS[1], zorder=3)
    axes.axhline(1, color=COLOURS[2], lw=2, zorder=2)
    axes.set_yscale("log", base=2)
    axes.set_ylim(1 / reach, reach)
    steps = [2.0**step for step in range(1, 11) if 2.0**step <= reach]
    every = -(-len(steps) // 3)
    steps = steps[every - 1 :: every]
    axes.set_yticks([1 / s for s in reversed(steps)] + [1] + steps, [f"{s:,.0f} × too low" for s in reversed(steps)] + ["as measured"] + [f"{s:,.0f} × too high" for s in steps])
    axes.minorticks_off()
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def progress():
    """What you have done so far, by lab: from the ledger on this machine (see labsupport/ledger.py)."""
    return Progress()


def guesses():
    """Your first guess of each lab beside what was measured, and whether the guesses get closer."""
    return Guesses()
