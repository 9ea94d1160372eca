"""The judge of the capstone: which faults are left in a training script, what it still does, and what its model has learnt.

The functions are measured on small inputs (capstone_rules.py). Then main runs under the budgets, and the models that it
trains (capstone_training.py) are asked about photographs that the script has never been given.
"""

from dataclasses import dataclass, field

import cloudpickle
import numpy as np
import pandas as pd

from labsupport.ground.budget import MIB, parse_size
from labsupport.ground.record import Cause
from labsupport.lesson import capstone_rules as rules
from labsupport.lesson.capstone_training import made_at
from labsupport.showing.running import run

# How much lower the accuracy of the best rate may be. Measured over seven runs: 0.55 to 0.71, on 96 photographs.
LEARNS = 0.25
# What any rate must reach, as a share of what the best one reached before. Measured over 21 trainings: 0.5 and more.
TRIED = 0.3
# Of the steps that the given script takes: one batch left out, of eight in an epoch, is too many.
ENOUGH = 0.9
# By how much main may tell more than its best model scores on photographs held back: they are 96, and main has its own.
TOO_MUCH = 0.3
_SECONDS = 240  # for what takes a twentieth of that on two idle cores


def script_functions(namespace):
    """The script's functions out of a namespace such as globals(); one that is missing is None."""
    return {name: namespace.get(name) for name in rules.SCRIPT}


@dataclass
class Trained:
    """What main trained. says: what it returned, None if that is no number; updates: {rate: number of them};
    scores: {rate at the end of a training: accuracy on the photographs held back}.
    """

    says: float | None
    updates: dict
    scores: dict

    @property
    def best(self):
        """Accuracy of the best model that was trained; 0 where none could be seen at the end of a training."""
        return max(self.scores.values(), default=0.0)


class Judge:
    """Knows the script as it was, and photographs that it holds back.

    given: the script's functions as they were; rates, epochs: what they train; validation: how many of its files main
    keeps for validation; held_back: how many of the last files no script is given. hidden, truth, images: those files, their
    labels and what the given script makes of them. before, trained: the ArmResult of the given main, and its Trained.
    """

    def __init__(self, given, files, labels, rates, epochs, validation, held_back):
        self.files, self.labels = files[:-held_back], np.asarray(labels[:-held_back])
        self.hidden, self.truth = files[-held_back:], np.asarray(labels[-held_back:])
        self.rates = {float(given["learning_rate"](rate, epochs - 1)): rate for rate in rates}  # by the last of each
        first = run(rules.facts, given, self.hidden, label="the photographs that are held back", quiet=True)
        self.images, parameters = _value(first)
        self.facts = {
            "parameters": parameters,
            "image": self.images.shape[1:],
            "last": list(self.rates),
            "validation": validation,
        }
        self.looked = {}  # {part of rules.PARTS: (the functions that it calls, as bytes, its figures, its troubles)}
        self.before, self.trained = self.run(given, None, "as it was, no tight budget")

    def run(self, script, budget, label):
        """(the ArmResult of main, whose value is what main returned; Trained, or sentences that say why there is none)."""
        result = run(rules.work, script, self.files, self.labels, list(self.rates), budget=budget, label=label)
        if not result.ok:
            return result, [_why(result)]
        result.value, updates, weights = result.value
        asked = script, self.facts, self.hidden, self.images, weights
        scoring = run(rules.answers, *asked, label="the photographs that are held back", quiet=True)
        if not scoring.ok:
            return result, [_why(scoring)]
        answers, troubles = scoring.value
        if troubles:
            return result, troubles
        return result, scored(result.value, updates, answers, self.truth)

    def look(self, script, *parts):
        """(figures, troubles) of the functions in some parts of rules.PARTS."""
        if troubles := _unsendable(script):
            return {}, troubles
        figures, troubles = {}, []
        for part in parts:
            asked = script, self.facts, rules.PARTS[part]
            result = run(rules.measure, *asked, label=f"your functions, measured: {part}", quiet=True, timeout=_SECONDS)
            found, told = result.value if result.ok else ({}, [_why(result)])
            self.looked[part] = _called(script, part), found, told
            figures, troubles = figures | found, troubles + told
        return figures, list(dict.fromkeys(troubles))

    def _newest(self, script, *parts):
        """look(), but for parts whose newest look was at the very same functions: that one counts."""
        known = [part for part in parts if self.looked.get(part, [None])[0] == _called(script, part)]
        figures, troubles = self.look(script, *[part for part in parts if part not in known])
        for _, found, told in map(self.looked.get, known):
            figures, troubles = figures | found, troubles + told
        return figures, list(dict.fromkeys(troubles))

    def check(self, script, budgets):
        """Measure a script's functions, and run it under budgets = {level: size}; a Report.

        Where no fault is found, the smallest budget comes first, and who passes it has passed all. Otherwise the largest
        does: a run that finishes shows its exact peak, so the next one is under the smallest budget that this fits into.
        """
        sizes = sorted(set(budgets.values()), key=parse_size, reverse=True)
        if troubles := _unsendable(script):
            return Report(budgets, {}, troubles)
        figures, troubles = self._newest(script, "images", "training")
        clean, runs = not (troubles or faults_of(figures)), {}

        def under(size):
            runs[size] = self.run(script, size, f"your script, {size}")
            return runs[size][0]

        if not (clean and under(sizes[-1]).ok):
            first = under(sizes[0]) if sizes[0] not in runs else runs[sizes[0]][0]
            peak = first.figures["peak"] if first.ok else float("inf")
            fitting = [size for size in sizes if size not in runs and peak <= parse_size(size)]
            if fitting:
                under(fitting[-1])
        runs = {size: runs[size] for size in sizes if size in runs}
        if any(result.ok for result, _ in runs.values()):
            of_main, more = self._newest(script, "main")
            figures, troubles = figures | of_main, [*troubles, *more]
        report = Report(budgets, {size: result for size, (result, _) in runs.items()}, troubles, figures)
        trained = next((trained for result, trained in reversed(runs.values()) if result.ok), [])
        if isinstance(trained, Trained):
            report.trained = trained
            trained = undone(trained, self.trained, self.rates, len(self.truth))
        report.left += trained
        return report


def _called(script, part):
    """The functions that a part of rules.PARTS calls, with all that they refer to, as bytes."""
    return cloudpickle.dumps({name: script[name] for name in rules.CALLED.get(part, rules.SCRIPT)})


def scored(says, updates, answers, truth):
    """Trained, from what rules.work() and rules.answers() give. An image may be made by the script, or as it was: the better."""
    scores = {rate: max(float(np.mean(classes == truth)) for classes in both) for rate, both in answers.items()}
    return Trained(says, updates, scores)


def undone(trained, before, rates, photographs):
    """What main left undone, in sentences. before: Trained of the script as it was; rates: {last of a training: its first}."""
    if not trained.updates:
        return [rules.told("main", "takes no training step in its own process")]
    steps = [(rate, number, made_at(rate, trained.updates)) for rate, number in before.updates.items()]
    found = [
        f"main takes {made} steps at a rate of {rate:.3g}, and it took {number}"
        for rate, number, made in steps
        if made < ENOUGH * number
    ]
    found[1:] = [f"and fewer at {len(found) - 1} more rates"] * (len(found) > 1)
    least, on = before.best - LEARNS, f"on {photographs} photographs held back"
    if trained.best < least:
        asked = f"where at least {least:.2f} is asked for"
        found.append(f"the model that main trained scores {trained.best:.2f} {on}, {asked}")
    else:
        poor = {rate: trained.scores.get(last, 0) for last, rate in rates.items()}
        found += [
            f"the model that main trained from a rate of {rate:g} scores {score:.2f} {on}: is it trained?"
            for rate, score in poor.items()
            if score < TRIED * before.best
        ]
    if trained.says is None:
        found.append(rules.told("main", "returns no number"))
    elif trained.says > trained.best + TOO_MUCH:
        found.append(f"main says {trained.says:.2f}, and the best model that it trained scores {trained.best:.2f} {on}")
    return found


def _value(result):
    if not result.ok:
        raise RuntimeError(f"the script as it was does not run: {result.error}")
    return result.value


def _unsendable(script):
    """Why the functions of the script cannot be sent to a process of their own, or main not be called, in sentences."""
    found = [] if callable(script["main"]) else [rules.told("main", rules.no_function(script["main"]))]
    for name, function in script.items():
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # whatever an odd object raises
            what = f"cannot be sent to a process of its own ({error}): make what it uses inside the function"
            found.append(rules.told(name, what))
    return found


def _why(result):
    """Why an arm of the script's functions did not return, in a sentence that names one."""
    name = next((part for part, _ in reversed(result.open_phases) if part in rules.SCRIPT), "main")
    cause = result.error.cause
    if cause is Cause.TIMEOUT:
        return rules.told(name, "does not come to an end")
    if cause in (Cause.OOM, Cause.MEMORY):
        return f"{name} runs out of memory: {result.error}"
    if cause.of_memory:
        return f"{name} runs out of memory, and its process ends with it"
    if cause is Cause.ERROR:
        return rules.told(name, f"raises {result.error}")
    return rules.told(name, f"takes its process with it ({result.error.message})")


@dataclass
class Report:
    """What the checker found.

    runs: {budget: ArmResult} of main, from the largest budget on. left: sentences, what the script leaves undone or does
    wrong. measured: {fault: figure}. trained: a Trained, or None where main did not get so far.
    """

    budgets: dict
    runs: dict
    left: list = field(default_factory=list)
    measured: dict = field(default_factory=dict)
    trained: Trained | None = None

    @property
    def faults(self):
        """Names of the faults that are left, in the order of FAULTS."""
        return faults_of(self.measured)

    @property
    def best(self):
        """The run under the smallest budget that sufficed; the one that died if none did; None if none was tried."""
        return ([result for result in self.runs.values() if result.ok] or list(self.runs.values()) or [None])[-1]

    def missing(self, level, forgive_faults=False):
        """What a level still asks for, in words; "" if it is passed."""
        why = [sentence for sentence in (self._memory(self.budgets[level]), *self.left) if sentence]
        if self.faults and (why or not forgive_faults):
            why.append("left: " + ", ".join(f"{name} (lab {rules.FAULTS[name].number})" for name in self.faults))
        return "; ".join(why)

    def _memory(self, size):
        """What a budget still asks for of main's memory, from its own run if there was one; "" for nothing."""
        if size in self.runs:
            return "" if self.runs[size].ok else _why(self.runs[size])
        if self.best is None or (self.best.ok and self.best.budget <= parse_size(size)):
            return ""
        why = f"had a peak of {self.best.peak_mib:.0f} MiB" if self.best.ok else "did not come to its end"
        return f"not tried under {size}: under {self.best.budget / MIB:.0f} MiB main {why}"

    @property
    def frame(self):
        """A row a fault."""
        rows = [
            {
                "fault": name,
                "lab": fault.number,
                "what is measured": fault.what,
                "measured": self.measured.get(name),
                "at most": fault.most,
                "": "LEFT" if name in self.faults else "" if name in self.measured else "not measured",
            }
            for name, fault in rules.FAULTS.items()
        ]
        return pd.DataFrame(rows).set_index("fault").round(2)


def faults_of(measured):
    """The faults that these figures show."""
    return [name for name, fault in rules.FAULTS.items() if measured.get(name, 0) > fault.most]
