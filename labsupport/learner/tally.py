"""What the entries of a ledger come to: the guess of each lab that counts, exercises passed, verdicts seen. No drawing."""

import math
from dataclasses import dataclass

from labsupport.lesson.catalogue import Lab, labs

# These three are our own choice; no figure of a lab depends on them.
FEW = 4  # guesses, below which no tendency is told: two against two
CHANGED = 0.9  # of the factor at first that the factor lately must be below, to be told as closer
REAL = (1e-6, 1e9)  # MiB, a byte to a petabyte; a guess beyond is none


@dataclass(frozen=True)
class FirstGuess:
    """The first guess other than 0 of one lab, in MiB. late: made after a run without a guess had shown the answer."""

    lab: Lab
    guess: float
    measured: float
    late: bool

    @property
    def factor(self):
        """Guess over measurement: 0.5 is half of it, 2 is twice."""
        return self.guess / self.measured


def _lab(entry):
    """The lab that an entry belongs to; None for a notebook of the learner's own.

    By its name without the number: an entry from before the series was numbered anew still counts.
    """
    return labs().get(entry["lab"][3:])


def first_guesses(kept):
    """The guess of each lab that counts, in order of time. A learner who runs a lab again knows the answer by then."""
    found, shown = {}, set()
    for entry in kept:
        lab, guess, measured = _lab(entry), entry.get("guess_mib"), entry.get("measured_mib")
        if not lab or entry["kind"] != "guess" or not measured or not REAL[0] < measured < REAL[1]:
            continue
        if REAL[0] < guess < REAL[1] and lab not in found:
            found[lab] = FirstGuess(lab, guess, measured, lab in shown)
        shown.add(lab)
    return list(found.values())


def standing(kept):
    """{Lab: (numbers of the exercises passed, claims whose verdict was seen)} for each lab that has an entry."""
    found = {}
    for entry in kept:
        if lab := _lab(entry):
            passed, seen = found.setdefault(lab, (set(), set()))
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
    change = "stayed about as close"
    if lately < CHANGED * first:
        change = "got closer"
    elif first < CHANGED * lately:
        change = "got farther off"
    compared = f"(the first {half} guesses against the last {half})"
    return f"Your guesses {change}: off by a factor of {first:.1f} at first, {lately:.1f} lately {compared}."
