"""The peak taken apart: which kinds, lines and tensors held an arm's memory at its worst moment, over time, and what grows."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labsupport.ground.budget import MIB, machine_memory, mib, parse_size
from labsupport.ground.result import ArmResult
from labsupport.peak.kinds import KINDS
from labsupport.peak.looking import looked
from labsupport.peak.parts import LEAST, parts_of, totals
from labsupport.showing import live, running
from labsupport.showing.cards import template
from labsupport.showing.curve import COLOUR_OF, stacked
from labsupport.showing.palette import BUDGET_LINE, FIGURES, OUTLINE
from labsupport.showing.peak_page import page
from labsupport.showing.plain import for_matplotlib, plain, say
from labsupport.showing.words import bundle

TITLE = "The peak taken apart"  # begins the words beside the picture
_SMALL = 9.5  # points of the small print; a picture of ten inches is shown at nine tenths in a browser of 1,280 pixels
_LETTERS = 108  # of small print that fit side by side over the whole width of the picture
_FEWEST = 4  # letters of a name that still say something
_SEEN = 0.001  # of the axis: what is narrower is no colour in the picture
_ROWS = ("kind", "line", "tensor")
_MOST = 6  # rows of the table for each arm
_FOR_RECORDING = 2**30  # bytes beside the tensors; ten seconds of many small operations took 0.43 GiB
_WHOLE = 3  # seconds: a run that took less is looked at to its end; recording many small operations doubles its time
_FULL = 0.97  # of the budget: of a pool that is in use so far, what is free lies in splinters, whatever they sum up to
_GROWS = 0.01  # of what is in use at the worst moment, over all that was seen: growth of less is told nowhere
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
    return result.budget if result.in_use + result.wanted > _FULL * result.budget else None


def _enough(result, limit):
    """Bytes in use at which a look has seen the worst moment, and ends; None for one that goes on to the function's end."""
    peak = result.figures["peak"]
    if limit is not None or not result.ok or not peak:
        return limit
    return None if result.seconds < _WHOLE else _REACHED * peak


# Code and names break behind these signs: a table wider than its cell would hide what counts most in it. A style that says
# so does not arrive: JupyterLab takes it out of outputs.
_SIGNS = re.compile(r"([._/(\[,=])")


def _breakable(text):
    return _SIGNS.sub("\\1\u200b", text)


_TABLES = template(
    """\
{% for arm, moment, after, rows in tables %}
<table style="width:100%;border-collapse:collapse;table-layout:auto;margin:6px 0"><caption style="text-align:left">
<b>{{ arm.label }}</b>, largest holders {{ moment }}</caption>
<thead><tr>{% for name in ("MiB", "share", "what", "line", "tensor") %}
<th scope="col" style="text-align:{{ "right" if loop.index < 3 else "left" }}">{{ name }}</th>{% endfor %}</tr></thead><tbody>
{% for row in rows %}<tr style="vertical-align:top"><td style="text-align:right">{{ "{:,.1f}".format(row["MiB"]) }}</td>
<td style="text-align:right">{{ "{:.0%}".format(row["share"]) }}</td><td style="text-align:left">{{ row["what"] }}</td>
<td style="text-align:left"><code>{{ breakable(row["line"]) }}</code></td>
<td style="text-align:left">{{ breakable(row["tensor"]) }}</td></tr>
{% endfor %}</tbody></table>
{% for words in after %}<div>{{ words }}</div>{% endfor %}
{% endfor %}
<small>Measured in a second run of the same function. Sizes are the allocator's chunks, which can be larger than their
tensors; shares are of the arm's memory in use at that moment.</small>"""
)


@dataclass
class Apart:
    """arms: a Parts for each; budgets: bytes, of those that were given."""

    arms: list
    budgets: list

    @property
    def frame(self):
        """A row for each kind, line, operation and shape, largest first; MiB and shares of the arm's memory in use."""
        return pd.DataFrame([{"arm": arm.label, **row} for arm in self.arms for row in self._rows(arm)])

    @staticmethod
    def _rows(arm):
        return [
            {
                "MiB": row.size / MIB,
                "share": row.size / arm.level,
                "what": row.kind,
                "line": row.code,
                "tensor": row.tensor,
            }
            for row in arm.rows
        ]

    @property
    def text(self):
        return plain("\n".join(line for arm in self.arms for line in _lines(arm)))

    def save(self, path):
        """Write all of it as one HTML page to explore: zoom, search, cut by line or layer, all arms side by side.

        The page needs no network. Returns the path. Raises OSError where it cannot be written, RuntimeError without plotly.
        """
        sentences = [[_headline(arm), *_after(arm)] for arm in self.arms]
        path = Path(path)
        path.write_text(page(self.arms, self.budgets, sentences), encoding="utf-8")
        say(
            f"{path}: a page to explore, open it in a browser ({path.stat().st_size / 1e6:.1f} MB, most of it the library that draws)"
        )
        return path

    def _ipython_display_(self):
        from IPython.display import HTML, display

        data, metadata = bundle(figure(self), f"{TITLE}\n{self.text}")
        display(data, metadata=metadata, raw=True)
        tables = [(arm, _moment(arm), [*_after(arm)], self._rows(arm)[:_MOST]) for arm in self.arms]
        display(HTML(_TABLES.render(tables=tables, breakable=_breakable)))

    def __str__(self):
        return self.text


def _moment(arm):
    return "when it first wanted more than its budget" if arm.asked else "at the worst moment"


def _headline(arm):
    asked = "" if arm.asked is None else f", and {mib(arm.asked.size)} more asked for by {arm.asked.tensor}"
    return f"{mib(arm.level)} in use {_moment(arm)}{asked}; {arm.named:.1%} of it named"


def _lines(arm):
    yield f"{arm.label}: {_headline(arm)}"
    yield f"  {_by_kind(arm.rows)}"
    for row in arm.rows[:_MOST]:
        line = f"line {row.code}" if row.line else "no line"
        yield f"  {mib(row.size)}: {row.kind}; {line}; {row.tensor}"
    yield from (f"  {words}" for words in _after(arm))


def _after(arm):
    """Sentences on what grew, and on what was left at the end."""
    least = max(_GROWS * arm.level / max(arm.moments - 1, 1), LEAST)
    for grown in arm.growth:
        if grown.size >= least:
            line = f" at line {grown.line.number}: {grown.line.source}" if grown.line else ""
            yield f"Grows by {mib(grown.size)} with every {arm.moment} ({grown.kind}){line}"
    if arm.window:
        yield f"Recorded is {arm.window}; what came later is not looked at."
    elif arm.end is None:
        yield "Looked at up to its worst moment, not to its end."
    else:
        kinds = _by_kind(arm.end)
        yield f"At its end {mib(sum(row.size for row in arm.end))} were left" + (f": {kinds}" if kinds else "") + "."


def _by_kind(rows):
    return ", ".join(f"{kind} {size / MIB:,.1f}" for (kind,), size in totals(rows, "kind") if size >= LEAST)


def figure(apart):
    """For each arm its curve over time, and below it a bar of its worst moment: cut by kind, each kind by line, each line by tensor."""
    ends = [arm.level + (arm.asked.size if arm.asked else 0) for arm in apart.arms]
    width = max([*ends, *apart.budgets]) / MIB * 1.02
    with rc_context(FIGURES):
        drawn = Figure(figsize=(10, 3.7 * len(apart.arms) + 0.5))
        rows = drawn.subplots(2 * len(apart.arms), height_ratios=[1, 1.25] * len(apart.arms), squeeze=False)[:, 0]
        for over_time, axes, arm in zip(rows[::2], rows[1::2], apart.arms):
            stacked(over_time, arm, apart.budgets, width)
            over_time.set_title(f"{for_matplotlib(arm.label)}: {arm.level / MIB:,.1f} MiB in use {_moment(arm)}")
            _bars(axes, arm, width)
            for budget in set(apart.budgets):
                axes.axvline(budget / MIB, color=BUDGET_LINE, lw=1.5, ls=(0, (6, 3)))
            axes.set(xlim=(0, width), yticks=range(len(_ROWS)), yticklabels=_ROWS, ylim=(len(_ROWS) - 0.5, -0.5))
            axes.set_xlabel(f"MiB {_moment(arm)}" + ", dashed = budget" * bool(apart.budgets), fontsize=9, labelpad=1)
            axes.tick_params(labelsize=9)
            axes.grid(False)
        seen = [arm.by("kind") for arm in apart.arms]
        there = [kind for kind in KINDS if max(sums.get(kind, 0) for sums in seen) > _SEEN * width]
        patches = [Patch(color=COLOUR_OF[kind], label=kind) for kind in there]
        drawn.legend(handles=patches, loc="outside upper center", ncols=min(len(there), 7), fontsize=_SMALL)
    return drawn


def _bars(axes, arm, width):
    """The nested bars of one arm, on an axis `width` MiB wide."""
    left = [0.0] * len(_ROWS)
    for kind, size in arm.by("kind").items():
        left[0] = _bar(axes, 0, left[0], size, f"{kind} {size:,.1f}", COLOUR_OF[kind], width)
        of_kind = [row for row in arm.rows if row.kind == kind]
        for (line,), size in totals(of_kind, "line"):
            rows = [row for row in of_kind if row.line == line]
            left[1] = _bar(axes, 1, left[1], size / MIB, rows[0].code or "no line", COLOUR_OF[kind], width)
            for row in rows:
                left[2] = _bar(axes, 2, left[2], row.size / MIB, row.tensor, COLOUR_OF[kind], width)
    if arm.asked is not None:
        size, name = arm.asked.size / MIB, arm.asked.tensor
        axes.barh(0, size, 0.9, left=left[0], fill=False, edgecolor=OUTLINE, ls=":", lw=1.5)
        _words(axes, 0, left[0], size, f"asked for: {size:,.1f}, {name}", width)


def _bar(axes, row, left, size, words, colour, width):
    """Draw one piece; returns where the next one begins."""
    axes.barh(row, size, 0.9, left=left, color=colour, lw=0.8)
    _words(axes, row, left, size, words, width)
    return left + size


def _words(axes, row, left, size, words, width):
    letters = int(size / width * _LETTERS)
    if letters >= _FEWEST:
        words = words if len(words) <= letters else words[: letters - 1] + "…"
        axes.text(left + size / 2, row, for_matplotlib(words), ha="center", va="center", fontsize=_SMALL)
