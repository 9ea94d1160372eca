"""The doctor in a terminal: a line now and then while the script runs, and the report at its end.

What comes from the script (its path, names, errors) is shown as it is: as Text, never as markup.
"""

import json
import os
import time

from rich.table import Table
from rich.text import Text

from labsupport.doctor.figures import least_peak, unexplained, variables_rose, wanted
from labsupport.doctor.suspects import died_of_memory
from labsupport.ground.budget import MIB, mib
from labsupport.ground.record import Facts, Watcher
from labsupport.ground.result import SOURCES
from labsupport.lesson.catalogue import see_lab
from labsupport.showing.palette import BAD, COLOURS, GOOD, UNKNOWN
from labsupport.showing.plain import plain

_ROWS, _COLUMNS = 6, 60  # of the chart: with its axis it fits a terminal of 80 columns, above the script's own lines
_BLOCKS = " ▁▂▃▄▅▆▇█"
_QUIET_SECONDS = 30  # between two lines of progress: a log stays readable
_NEAR = 0.97  # of its budget: an order of operations in a graph moves a peak by a few per cent (lab 05)
LEAST_PART = MIB / 10  # smaller parts of the peak would all read "0.0 MiB"
_FIGURES = {
    "peak": "tensors, peak",
    "end": "tensors, at the end",
    "process_peak": "process, peak",
    "process_end": "process, at the end",
}


def chart(curve, top):
    """Lines of text that draw [(seconds, bytes)] up to `top` bytes, the newest sample on the right."""
    if not curve:
        return [""] * _ROWS
    end = curve[-1][0] or 1.0
    heights = [0.0] * _COLUMNS
    for seconds, size in curve:
        column = min(int(seconds / end * _COLUMNS), _COLUMNS - 1)
        heights[column] = max(heights[column], size)
    for column in range(1, _COLUMNS):  # between two samples the level stays
        heights[column] = heights[column] or heights[column - 1]
    eighths = [min(round(height / top * 8 * _ROWS), 8 * _ROWS) for height in heights]
    return ["".join(_BLOCKS[min(max(e - 8 * row, 0), 8)] for e in eighths) for row in reversed(range(_ROWS))]


class DoctorDisplay(Watcher):
    """Of the doctor's script: a line now and then. Its own output goes its own way, and Ctrl+C ends it."""

    def __init__(self, script, budget, console=None):
        self._script, self._console, self._said = plain(script), console, time.monotonic()
        self._ran_out = self._waits = False  # whether it was said
        self._say(f"doctor: starting {self._script} under a budget of {budget} for tensors …")

    def _say(self, line):
        if self._console is not None:
            self._console.print(Text(line), soft_wrap=True)

    def update(self, result, elapsed, started):
        """A line of progress, seldom enough for a log to stay readable."""
        if result.dumps and not self._ran_out:
            self._ran_out = True
            self._say(f"doctor: {self._script}: no room for a tensor; TensorFlow tries for ten seconds each time …")
        if time.monotonic() - self._said < _QUIET_SECONDS:
            return
        self._said = time.monotonic()
        facts = result.facts or Facts()
        level = mib(result.tensors[-1][1] if result.tensors else None)
        self._say(
            f"doctor: {self._script}: {elapsed:.0f} s · tensors {level} of {mib(result.budget)} · "
            f"{sum(step.count for step in facts.steps)} steps · {facts.number_of_passes} passes over data"
        )

    def waits(self):
        """The script has loaded TensorFlow and computes nothing."""
        if not self._ran_out and not self._waits:
            self._waits = True
            self._say(
                f"doctor: {self._script}: computes nothing just now; where memory runs out, TensorFlow itself waits ten "
                "seconds for some, each time …"
            )


def drawn(result):
    """The chart of a run's tensor memory with its axis, as lines of text; none where there are no samples."""
    if len(result.tensors) < 2:
        return []
    highest = max(size for _, size in result.tensors)
    top = max(result.budget, highest) if result.budget_given else max(MIB, 1.1 * highest)
    axis = [f"{top / MIB:,.0f} MiB", *[""] * (_ROWS - 2), "0 MiB"]
    rows = [f"{label:>12} │{line}" for label, line in zip(axis, chart(result.tensors, top))]
    return [*rows, f"{'':12} └{'─' * _COLUMNS} time, {result.tensors[-1][0]:.0f} s"]


def report(diagnosis, console, changed=(), tried=()):
    """Print a Diagnosis: what happened, who is suspected and why, then the figures; changed, tried: sentences of against.py and trying.py."""
    result = diagnosis.result
    console.rule(Text(f"doctor: {plain(result.label)}"))
    time_taken = "" if result.seconds is None else f" after {result.seconds:.1f} s"
    status = result.status or 0
    status = status if status >= 0 else 128 - status  # after a signal: as a shell gives it
    told = f", exit status {status}" * bool(status)
    console.print(Text.assemble((result.outcome, "bold"), time_taken, told))
    if result.error is not None:
        console.print(Text(plain(str(result.error))))
    for number, suspect in enumerate(diagnosis.suspects, 1):
        _print_suspect(number, suspect, console)
    if not diagnosis.suspects:
        look, sentence = no_suspect(result)
        console.print(Text.assemble("\n", (look.sign, look.colour), " ", sentence))
    console.print()
    for line in drawn(result):
        console.print(Text(line, style=COLOURS[0], no_wrap=True))
    console.print(_table(diagnosis))
    sources = "; ".join(dict.fromkeys(SOURCES.values()))
    console.print(
        Text(f"Sources: {sources}; parts: objects that were alive, and what remains of the peak", style="dim")
    )
    _print_holders(diagnosis, console)
    for sentence in diagnosis.growth:
        console.print(Text(f"over time: {plain(sentence)}"))
    for sentence in changed:
        console.print(Text(f"against the earlier run: {plain(sentence)}"))
    for sentence in tried:
        console.print(Text(f"tried: {plain(sentence)}"))
    if result.facts is not None and result.facts.ignored:
        console.print(Text(f"ignored, since the doctor sets up the GPU: {', '.join(result.facts.ignored)}"))


def _print_suspect(number, suspect, console):
    size = "outside TensorFlow's allocator" if suspect.size is None else mib(suspect.size)
    title, at = (f"{number}. {suspect.kind}", "bold"), f", {plain(suspect.place)}" * bool(suspect.place)
    console.print(Text.assemble("\n", (BAD.sign, BAD.colour), " ", title, f" ({size}){at}: {see_lab(*suspect.labs)}"))
    for sentence in suspect.evidence:
        console.print(Text(f"   {plain(sentence)}"))
    console.print(Text(f"   to change: {suspect.change}"))


def _print_holders(diagnosis, console):
    """Who held memory at the peak, by line, or how to learn it."""
    facts = diagnosis.result.facts
    for row in facts.holders if facts else ():
        console.print(Text(f"at the peak: {plain(row)}"))
    if diagnosis.suspects and facts is not None and not facts.holders:
        console.print(Text("Which lines held it: run this again with --lines", style="dim"))


def _table(diagnosis):
    table = Table(title="Figures", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    table.add_column("added", justify="right", no_wrap=True)
    for words, size in figures(diagnosis.result):
        table.add_row(words, size)
    for words, size in diagnosis.parts.rows():
        if size >= LEAST_PART:
            table.add_row(f"  of the peak: {words}", mib(size))
    if asked := wanted(diagnosis.result):
        table.add_row("asked for then, and not found", mib(asked))
    return table


def figures(result):
    """[(words, size in words)] of what was counted."""
    return [(words, _figure(result, name)) for name, words in _FIGURES.items()]


def _figure(result, name):
    """A figure in words; of a process that died before it could read its counters, the highest level seen is the least."""
    if result.figures[name] is None and name == "peak" and (least := least_peak(result)):
        return f"at least {mib(least)}"
    return mib(result.figures[name])


def no_suspect(result):
    """(how good the news is, a sentence) where nobody is suspected."""
    if result.facts is None or result.facts.unseen:
        return UNKNOWN, _not_seen(result)
    if died_of_memory(result):
        return UNKNOWN, "It died of memory, but nothing that was alive explains it."
    if not result.ok:
        until = "until then nothing grew" if _has_steps(result.facts) else _NO_STEPS
        return UNKNOWN, f"It ended for another reason than memory; {until}."
    if result.dumps:
        return UNKNOWN, f"It finished, but TensorFlow's allocator ran out {len(result.dumps)} times on the way."
    near = result.budget_given and (result.figures["peak"] or 0) > _NEAR * result.budget
    edge = " Its peak is at the edge of the budget: another order of operations, and it may not fit." * near
    if not _has_steps(result.facts):
        return UNKNOWN, f"It finished inside its budget; {_NO_STEPS}.{edge}"
    if rise := unexplained(result.facts):
        grew = f"what was in use before a step rose by {mib(rise)} from the first third of the run to the last"
        if (variables := variables_rose(result.facts)) > rise / 2:
            return (
                UNKNOWN,
                f"No suspect, and yet {grew}; variables rose by {mib(variables)}: larger models, or more.{edge}",
            )
        return UNKNOWN, f"No suspect, and yet {grew}, which nothing that was counted explains.{edge}"
    return GOOD, f"No suspect: it finished inside its budget, and nothing that stays alive grew with the steps.{edge}"


_NO_STEPS = (
    "whether anything grew cannot be told: nothing that repeats was seen (calls of a tf.function, a model or a layer, tapes, batches "
    "of a data set)"
)


def _has_steps(facts):
    return sum(step.count for step in facts.steps) > 1


def _not_seen(result):
    """A sentence where no probe has seen what held memory."""
    ended = "" if result.ok else " It ended for another reason than memory." * (not died_of_memory(result))
    if result.facts is not None and result.facts.unseen:
        names = ", ".join(map(plain, result.facts.unseen))
        return f"{names}: its memory is not TensorFlow's, so that the doctor cannot see it.{ended}"
    return f"TensorFlow was not loaded here, so there is nothing to tell of its memory.{ended}"


def annotations(diagnosis, script):
    """Lines that GitHub's CI shows beside the code: workflow commands, one for each suspect. script: its path, or a module's name."""
    lines = []
    for suspect in diagnosis.suspects:
        file, _, number = suspect.place.rpartition(":")
        file = script if file in ("", os.path.basename(script)) else file
        at = f"file={file}" + f",line={number}" * number.isdigit()
        words = f"{suspect.kind}: {'; '.join(suspect.evidence)}. To change: {suspect.change}"
        at, words = (plain(text).replace("%", "%25").replace("\n", "%0A") for text in (at, words))
        lines.append(f"::warning {at}::{words}")
    return lines


def as_json(diagnosis, changed=(), tried=()):
    """A Diagnosis as JSON. Sizes are bytes; null is "unavailable", and for a suspect "outside TensorFlow's allocator"."""
    result = diagnosis.result
    data = {
        "script": result.label,
        "outcome": result.outcome,
        "exit_status": result.status,
        "cause": None if result.ok else str(result.error.cause),
        "error": None if result.ok else plain(str(result.error)),
        "seconds": result.seconds,
        "budget": result.budget,
        "suspects": [_suspect_data(suspect) for suspect in diagnosis.suspects],
        "figures": result.figures,
        "parts_of_peak": dict(diagnosis.parts.rows()),
        "asked_for": wanted(result),
        "growth": diagnosis.growth,
        "lines": result.facts.holders if result.facts else [],
        "against": list(changed),
        "tried": list(tried),
    }
    return json.dumps(data, indent=2)


def _suspect_data(suspect):
    return {
        "kind": suspect.kind,
        "bytes": suspect.size,
        "place": suspect.place or None,
        "evidence": suspect.evidence,
        "change": suspect.change,
        "read": see_lab(*suspect.labs),
    }
