"""The peak taken apart: of each arm, which kinds, lines and tensors held its memory at its worst moment."""

import textwrap
from dataclasses import dataclass, replace

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labsupport.ground.budget import MIB, machine_memory, mib, parse_size
from labsupport.ground.result import ArmResult
from labsupport.peak.kinds import KINDS
from labsupport.peak.looking import looked
from labsupport.peak.parts import parts_of
from labsupport.showing import live, running
from labsupport.showing.palette import BUDGET_LINE, COLOURS, FIGURES, OUTLINE
from labsupport.showing.plain import for_matplotlib, plain
from labsupport.showing.words import bundle

_COLOUR = dict(zip(KINDS, [*COLOURS, "#AA7722", "#BBBBBB"]))
_LETTERS = 150  # of small print that fit side by side over the whole width of the picture
_FEWEST = 4  # letters of a name that still say something
_SEEN = 0.001  # of the axis: what is narrower is no colour in the picture
_ROWS = ("kind", "line", "tensor")
_LINE = 44  # letters of a line of code that leave room for the tensors beside it
_MOST = 6  # rows of the table for each arm
_FOR_RECORDING = 2**30  # bytes beside the tensors; ten seconds of many small operations took 0.43 GiB
_REACHED = 0.995  # of the measured peak: the rest is the order in which a graph's operations ran


def take_apart(*results):
    """Show who held the memory of arms at their worst moments: by kind, by line of the script, by operation and shape.

    Each arm runs once more while every allocation is recorded, since recording changes what a process takes; the figures
    of the first run stay. An arm that ran out of memory is looked at where it first wanted more than its budget, and is
    given room enough that it need not wait there. Raises ValueError for a result that cannot be run again.
    """
    if not results or not all(isinstance(result, ArmResult) for result in results):
        raise ValueError("take_apart() needs results of run(): take_apart(failure, fix)")
    return Apart([_parts(result) for result in results], [result.budget for result in results if result.budget_given])


def _parts(result):
    if result.job is None:
        raise ValueError(f'"{result.label}" cannot be run again: run its cell first')
    limit = _limit(result)
    job = replace(
        result.job,
        function=looked,
        args=(result.job.function, result.job.args, limit, _enough(result, limit)),
        label=f"{result.label}, looked at" + " with room enough" * (limit is not None),
        budget=result.job.budget if limit is None else None,
        outside=f"{min(parse_size(result.job.outside) + _FOR_RECORDING, machine_memory())} B",
    )
    look = running.watched(job, lambda: live.plot_for(quiet=True))
    if not look.ok:
        raise RuntimeError(f'"{result.label}" could not be looked at: {look.error}')
    return parts_of(result, look.value)


def _limit(result):
    """Bytes in use at which an arm found no room; None for one that did not, or had room, but in pieces (fragmentation)."""
    if result.ok or not result.error.cause.of_memory or not result.wanted:
        return None
    return result.budget if result.in_use + result.wanted > result.budget else None


def _enough(result, limit):
    """Bytes in use at which a look has seen the worst moment; None where only the end tells."""
    peak = result.figures["peak"]
    return limit if limit is not None else _REACHED * peak if result.ok and peak else None


@dataclass
class Apart:
    """arms: a Parts for each; budgets: bytes, of those that were given."""

    arms: list
    budgets: list

    @property
    def frame(self):
        """A row for each kind, line, operation and shape, largest first; MiB and shares of the arm's memory in use."""
        return pd.DataFrame(
            [
                {
                    "arm": arm.label,
                    "MiB": row.size / MIB,
                    "share": row.size / arm.level,
                    "what": row.kind,
                    "line": f"{row.line.number}: {row.line.source}" if row.line else "",
                    "tensor": row.tensor,
                }
                for arm in self.arms
                for row in arm.rows
            ]
        )

    @property
    def text(self):
        return plain("\n".join(line for arm in self.arms for line in _lines(arm)))

    def _ipython_display_(self):
        from IPython.display import HTML, display

        data, metadata = bundle(figure(self), "The peak taken apart\n" + self.text)
        display(data, metadata=metadata, raw=True)
        table = self.frame.groupby("arm", sort=False).head(_MOST)
        shown = table.assign(MiB=table["MiB"].map("{:,.1f}".format), share=table["share"].map("{:.0%}".format))
        shown = shown.assign(line=shown["line"].map(lambda line: textwrap.shorten(line, _LINE, placeholder=" …")))
        note = "<small>Sizes are the allocator's chunks, which can be larger than their tensors.</small>"
        display(HTML(plain(shown.to_html(border=0, index=False)) + note))  # pandas escapes markup

    def __str__(self):
        return self.text


def _moment(arm):
    return "when it first wanted more than its budget" if arm.asked else "at the worst moment"


def _lines(arm):
    asked = "" if arm.asked is None else f", and {mib(arm.asked.size)} more asked for by {arm.asked.tensor}"
    yield f"{arm.label}: {mib(arm.level)} in use {_moment(arm)}{asked}; {arm.named:.1%} of it named"
    yield "  " + ", ".join(f"{kind} {size:,.1f}" for kind, size in arm.by("kind").items() if size >= 0.05)
    for row in arm.rows[:_MOST]:
        line = f"line {row.line.number}, {row.line.source}" if row.line else "no line"
        yield f"  {mib(row.size)}: {row.kind}; {line}; {row.tensor}"


def figure(apart):
    """A bar for each arm, cut by kind, below that each kind by line, below that each line by operation and shape."""
    ends = [arm.level + (arm.asked.size if arm.asked else 0) for arm in apart.arms]
    width = max([*ends, *apart.budgets]) / MIB * 1.02
    with rc_context(FIGURES):
        drawn = Figure(figsize=(10, 1.6 * len(apart.arms) + 0.9))
        for axes, arm in zip(drawn.subplots(len(apart.arms), sharex=True, squeeze=False)[:, 0], apart.arms):
            _bars(axes, arm, width)
            for budget in set(apart.budgets):
                axes.axvline(budget / MIB, color=BUDGET_LINE, lw=1.5, ls=(0, (6, 3)))
            axes.set(xlim=(0, width), yticks=range(len(_ROWS)), yticklabels=_ROWS, ylim=(len(_ROWS) - 0.5, -0.5))
            axes.set_title(f"{for_matplotlib(arm.label)}: {arm.level / MIB:,.1f} MiB in use {_moment(arm)}")
            axes.grid(False)
        axes.set_xlabel("MiB" + ", dashed = budget" * bool(apart.budgets))
        seen = [arm.by("kind") for arm in apart.arms]
        there = [kind for kind in KINDS if max(sums.get(kind, 0) for sums in seen) > _SEEN * width]
        patches = [Patch(color=_COLOUR[kind], alpha=0.4, label=kind) for kind in there]
        drawn.legend(handles=patches, loc="outside upper center", ncols=len(there))
    return drawn


def _bars(axes, arm, width):
    """The nested bars of one arm, on an axis `width` MiB wide."""
    kinds = [*arm.by("kind")]
    lines = {kind: {} for kind in kinds}
    for row in arm.rows:
        lines[row.kind].setdefault(row.line, []).append(row)
    left = [0.0] * len(_ROWS)
    for kind in kinds:
        size = sum(row.size for rows in lines[kind].values() for row in rows) / MIB
        left[0] = _bar(axes, 0, left[0], size, f"{kind} {size:,.1f}", _COLOUR[kind], width)
        for line, rows in sorted(lines[kind].items(), key=lambda item: -sum(row.size for row in item[1])):
            size = sum(row.size for row in rows) / MIB
            words = f"{line.number}: {line.source}" if line else "no line"
            left[1] = _bar(axes, 1, left[1], size, words, _COLOUR[kind], width)
            for row in rows:
                left[2] = _bar(axes, 2, left[2], row.size / MIB, row.tensor, _COLOUR[kind], width)
    if arm.asked is not None:
        size, name = arm.asked.size / MIB, arm.asked.tensor
        axes.barh(0, size, 0.9, left=left[0], fill=False, edgecolor=OUTLINE, ls=":", lw=1.5)
        _words(axes, 0, left[0], size, f"asked for: {size:,.1f}, {name}", width)


def _bar(axes, row, left, size, words, colour, width):
    """Draw one piece; returns where the next one begins."""
    axes.barh(row, size, 0.9, left=left, color=colour, alpha=0.4, edgecolor="white", lw=0.8)
    _words(axes, row, left, size, words, width)
    return left + size


def _words(axes, row, left, size, words, width):
    letters = int(size / width * _LETTERS)
    if letters >= _FEWEST:
        words = words if len(words) <= letters else words[: letters - 1] + "…"
        axes.text(left + size / 2, row, for_matplotlib(words), ha="center", va="center", fontsize=7.5)
