"""The parts of an arm's peak, as its look brought them back (looking.py): rows, and sums of them."""

import textwrap
from dataclasses import dataclass
from typing import NamedTuple

from labsupport.ground.budget import MIB, mib
from labsupport.ground.result import Line, line_of

_LETTERS = 60  # of a line of code in a text: enough to know it by
LEAST = MIB // 20  # bytes: less reads "0.0 MiB"


class Row(NamedTuple):
    """Memory that was alive at the worst moment: bytes of `number` blocks that one operation asked for on one line.

    line: None where no line of the script is known; layer, operation, shape, dtype: "" where they are not.
    """

    kind: str
    line: Line | None
    layer: str
    operation: str
    shape: str
    dtype: str
    size: int
    number: int

    @property
    def code(self):
        """The line with its number; "" where it is not known."""
        return f"{self.line.number}: {self.line.source}" if self.line else ""

    @property
    def tensor(self):
        """What was made, in a few words: the layer's own name, the operation's, the shape."""
        times = f"{self.number:,} × " if self.number > 1 else ""
        layer, operation = (name.rpartition("/")[2] for name in (self.layer, self.operation))
        names = " · ".join(filter(None, [layer, operation])) or "without a name"
        return times + " ".join(filter(None, [names, self.shape]))


class Grown(NamedTuple):
    """Bytes of a kind that one line of the script leaves behind from moment to moment."""

    kind: str
    line: Line | None
    size: float


@dataclass(frozen=True)
class Parts:
    """Who held the memory of an arm at its worst moment, over time, and at its end.

    rows: largest first. asked: the Row that was asked for then, and for which there was no room; None for an arm that
    finished. level: bytes in use by the allocator's own count, without what was asked for. measured: the same in the run
    that was measured, None where it is unavailable. curve: [[seconds, {kind: bytes}]], at most a few hundred. end: the rows
    that were left; None where the look did not see the end. growth: what grows with every `moment`, of which `moments` were
    seen; empty if nothing does, or if they were too few. before: bytes in use when the recording began, of which the rows know
    nothing. window: what the recording holds, in words, where it does not hold all that was to be looked at.
    """

    label: str
    rows: list
    asked: Row | None
    level: int
    measured: int | None
    curve: list
    end: list | None
    moment: str
    moments: int
    growth: list
    before: int = 0
    window: str = ""

    @property
    def over_time(self):
        """A DataFrame of MiB: a row for each moment of the curve, in seconds of the run that was looked at, a column for each kind."""
        import pandas as pd

        seconds = pd.Index([second for second, _ in self.curve], name="seconds")
        return pd.DataFrame([kinds for _, kinds in self.curve], index=seconds).fillna(0.0) / MIB

    @property
    def named(self):
        """The share of the bytes in use that the rows account for."""
        return sum(row.size for row in self.rows) / self.level if self.level else 1.0

    def by(self, what):
        """{value: MiB} of the rows by "kind", "line", "layer" or "operation", largest first."""
        return {value: size / MIB for (value,), size in totals(self.rows, what)}


def totals(rows, *fields):
    """[((value of each field), bytes)] of rows that agree in these fields, largest first."""
    sums = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in fields)
        sums[key] = sums.get(key, 0) + row.size
    return sorted(sums.items(), key=lambda item: -item[1])


def parts_of(result, seen):
    """The Parts of an ArmResult; seen: what looked() brought back."""
    return parts(result.label, seen, result.in_use)


def parts(label, seen, measured):
    """Parts from plain data. measured: bytes in use at the worst moment of the run that counts, or None."""
    asked = _row(seen["asked"]) if seen["asked"] else None
    end = None if seen["end"] is None else _sorted(seen["end"])
    moment, moments, grown = seen["growth"]
    growth = [Grown(kind, line_of(file, number) if number else None, size) for kind, file, number, size in grown]
    rows = _sorted(seen["peak"])
    told = seen["curve"], end, moment, moments, growth, seen["before"], seen["window"]
    return Parts(label, rows, asked, seen["level"], measured, *told)


def largest(parts, most=3):
    """Texts on the kinds and lines that held most at the worst moment, largest first, such as "9.9 MiB weights (line 4: …)"."""
    first = totals(parts.rows, "kind", "line")[:most]
    return [f"{mib(size)} {kind} ({_at(line)})" for (kind, line), size in first if size >= LEAST]


def _at(line):
    if line is None:
        return "no line of the script"
    return f"{line.place}, line {line.number}: {textwrap.shorten(line.source, _LETTERS, placeholder=' …')}"


def _sorted(rows):
    return sorted(map(_row, rows), key=lambda row: -row.size)


def _row(row):
    kind, file, number, *rest = row
    return Row(kind, line_of(file, number) if number else None, *rest)
