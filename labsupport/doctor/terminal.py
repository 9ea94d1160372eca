"""The doctor in a terminal: a chart that moves while the script runs, and the report at its end."""

import re
import sys
import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from labsupport.ground.budget import MIB, mib
from labsupport.showing.live import TerminalPlot
from labsupport.ground.result import SOURCES

_ROWS, _COLUMNS = 6, 60
_BLOCKS = " ▁▂▃▄▅▆▇█"
_QUIET_SECONDS = 30  # between two lines of progress where there is no terminal to redraw
_TENSORFLOW_LOG = re.compile(r"^([IWEF]\d{4} |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: |WARNING: All log messages before absl|To enable the following instructions)")


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


class DoctorDisplay(TerminalPlot):
    """What run() draws into while the doctor's script runs. The script's own output goes on as it comes."""

    def __init__(self, script, budget):
        self._script, self._drawn, self._rest = script, 0.0, ""
        self._console = Console(stderr=True)
        self._live = None
        self._console.print(f"doctor: starting {script} under a budget of {budget} for tensors …", highlight=False)
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, refresh_per_second=4, redirect_stdout=sys.stdout.isatty())
            self._live.start()

    def hear(self, kind, text):
        if kind == "text":
            sys.stdout.write(text)
            sys.stdout.flush()
            return
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if not _TENSORFLOW_LOG.match(line):
                print(line, file=sys.stderr)

    def update(self, result, elapsed, started):
        now = time.monotonic()
        if now - self._drawn < (0.25 if self._live else _QUIET_SECONDS):
            return
        self._drawn = now
        steps = sum(step["count"] for step in result.facts.get("steps", []))
        level = mib(result.tensors[-1][1] if result.tensors else None)
        line = f"{self._script}: {elapsed:.0f} s · tensors {level} of {mib(result.budget)} · {steps} steps · {result.facts.get('number_of_passes', 0)} passes over data"
        if self._live is None:
            if started:
                print(line, file=sys.stderr, flush=True)
            return
        if not started:
            self._live.update(Text(f"{self._script}: starting Python and TensorFlow … {elapsed:.0f} s"))
            return
        top = max([result.budget if result.budget_given else 0, MIB, *(1.1 * size for _, size in result.tensors)])
        axis = [f"{top / MIB:,.0f} MiB", *[""] * (_ROWS - 2), "0 MiB"]
        rows = [Text.assemble((f"{label:>12} │", "dim"), (row, "dark_orange")) for label, row in zip(axis, chart(result.tensors, top))]
        self._live.update(Group(*rows, Text(f"{'':12} └{'─' * _COLUMNS} time, {elapsed:.0f} s", style="dim"), Text(line)))

    def finish(self, result):
        self.abandon()

    def abandon(self):
        if self._live is not None:
            self._live.stop()
        if self._rest:
            print(self._rest, file=sys.stderr)


def report(diagnosis, console):
    """Print a Diagnosis: what happened, who is suspected and why, then the figures."""
    result = diagnosis.result
    console.rule(f"doctor: {result.label}")
    console.print(f"[bold]{result.outcome}[/]" + ("" if result.seconds is None else f" after {result.seconds:.1f} s"), highlight=False)
    if result.error is not None:
        console.print(Text(str(result.error)))
    if not diagnosis.suspects:
        console.print("\n[green]✔[/] " + _nothing(diagnosis), highlight=False)
    for number, suspect in enumerate(diagnosis.suspects, 1):
        size = "outside TensorFlow's allocator" if suspect.size is None else mib(suspect.size)
        console.print(f"\n[dark_orange]✘[/] [bold]{number}. {suspect.kind}[/] ({size}): see lab {', '.join(suspect.labs)}", highlight=False)
        for sentence in suspect.evidence:
            console.print(Text(f"   {sentence}"))
    table = Table(title="Figures", title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("added", justify="right", no_wrap=True)
    names = {"peak": "tensors, peak", "end": "tensors, at the end", "process_peak": "process, peak", "process_end": "process, at the end"}
    for name, words in names.items():
        table.add_row(words, mib(result.figures[name]))
    for name, size in sorted(diagnosis.parts.items(), key=lambda part: -part[1]):
        if size >= MIB / 10:
            table.add_row(f"  of the peak: {name}", mib(size))
    console.print()
    console.print(table)
    console.print(Text(f"Sources: {'; '.join(dict.fromkeys(SOURCES.values()))}; parts: objects that were alive, and what remains of the peak", style="dim"))
    for sentence in diagnosis.growth:
        console.print(Text(f"growth: {sentence}"))
    ignored = result.facts.get("ignored")
    if ignored:
        console.print(Text(f"ignored, since TensorFlow was running already: {', '.join(ignored)}"))


def _nothing(diagnosis):
    result = diagnosis.result
    if not result.facts:
        return "The script never came to run, so there is nothing to tell."
    if diagnosis.died_of_memory:
        return "It died of memory, but nothing that was alive explains it."
    if result.error is not None:
        return "It ended for another reason than memory; until then nothing grew."
    return "No suspect: it finished inside its budget, and nothing that stays alive grew with the steps."
