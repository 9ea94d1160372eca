"""Still pictures of arms with matplotlib, readable on light and dark pages and for colour-blind eyes."""

import base64
import html
import io
import re
import textwrap

import numpy as np
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from labsupport.budget import MIB

# Okabe & Ito's palette, which stays apart for colour-blind readers; line styles say the same a second time.
COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
LINES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1))]
BUDGET = "#7F0000"
_ON_LINES = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}  # behind words that lie on curves


def style(index):
    """Colour and line style of the index-th arm."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}


def _without_wait(result, curve):
    """The curve up to its last change, and the seconds that an OOM then only waited (0 if it hardly did).

    TensorFlow waits ten seconds before it raises; drawn to scale, they would squeeze every other curve.
    """
    if result.outcome != "OOM" or not curve:
        return curve, 0.0
    moved = max((i for i in range(1, len(curve)) if curve[i][1] != curve[i - 1][1]), default=0)
    wait = result.seconds - curve[moved][0]
    return (curve[: moved + 1], wait) if wait > 3 else (curve, 0.0)


def _curves(axes, results, story):
    """The memory curves of all arms on one pair of axes, with budget line, phases and the point of an OOM."""
    crosses = []
    for index, result in enumerate(results):
        curve, wait = getattr(result, story), 0.0
        if len(results) > 1:
            curve, wait = _without_wait(result, curve)
        look = style(index)
        if curve:
            axes.plot([t for t, _ in curve], [size / MIB for _, size in curve], label=result.label, lw=2, **look)
        if result.error is not None and curve:
            crosses.append((*curve[-1], look["color"], result.outcome + (f", after {wait:.0f} s of waiting" if wait else "")))
    right = axes.get_xlim()[1]
    for seconds, size, colour, text in crosses:
        axes.plot(seconds, size / MIB, "X", color=colour, ms=11, mec="black", zorder=5)
        late = seconds > 0.5 * right
        axes.annotate(text, (seconds, size / MIB), xytext=(-10 if late else 10, -6), textcoords="offset points", va="top",
                      ha="right" if late else "left", fontweight="bold", bbox=_ON_LINES)  # fmt: skip
    given = {result.budget for result in results if result.budget_given}
    if story == "tensors":
        for budget in given:
            axes.axhline(budget / MIB, color=BUDGET, lw=1.5, ls=(0, (6, 3)))
            axes.annotate(f"budget {budget / MIB:.0f} MiB", (0.99, budget / MIB), xycoords=("axes fraction", "data"), xytext=(0, 3),
                          textcoords="offset points", va="bottom", ha="right", color=BUDGET, bbox=_ON_LINES)  # fmt: skip
    if len(results) == 1:
        for index, phase in enumerate(results[0].phases):
            axes.axvspan(phase.start, phase.end, color="#56B4E9", alpha=0.30 if index % 2 else 0.15, lw=0)
            if phase.end - phase.start > 0.05 * axes.get_xlim()[1]:  # narrower, and the names would overlap
                axes.annotate(phase.name, (phase.start, 0.98), xycoords=("data", "axes fraction"), xytext=(3, 0),
                              textcoords="offset points", va="top", fontsize=8, rotation=90)  # fmt: skip
    axes.set(xlabel="time (s)", ylabel="tensor memory (MiB)" if story == "tensors" else "process memory added (MiB)")
    axes.set_ylim(bottom=0)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.12)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)


def arm_figure(result):
    """One arm: tensor memory over time; the process's resident set as a thin grey line."""
    figure = Figure(figsize=(8, 2.9), layout="constrained", facecolor="white")
    axes = figure.subplots()
    _curves(axes, [result], "tensors")
    if result.process:
        axes.plot([t for t, _ in result.process], [size / MIB for _, size in result.process], color="#666666", lw=1,
                  label="process (resident set)")  # fmt: skip
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.15 * max(size for _, size in result.process) / MIB))
    if result.figures["peak"] is not None:
        axes.axhline(result.figures["peak"] / MIB, color=COLOURS[0], lw=1, ls=":", label=f"peak {result.peak_mib:,.1f} MiB (counter)")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9)
    axes.set_title(f"{result.label}: {result.outcome}", loc="left", fontsize=11)
    return figure


def compare_figure(results, story):
    """All arms: curves on one time and one byte axis on the left, exact peak and end as bars on the right."""
    figure = Figure(figsize=(9, 3.6 + 0.3 * max(len(results) - 3, 0)), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    _curves(left, results, story)
    if left.get_legend_handles_labels()[0]:
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=min(len(results), 3), frameon=False)
    names = ("peak", "end") if story == "tensors" else ("process_peak", "process_end")
    for index, result in enumerate(results):
        peak, end = (result.figures[name] for name in names)
        colour = style(index)["color"]
        if peak is not None:
            right.barh(index, peak / MIB, 0.7, color=colour, alpha=0.85)
        if end is not None and result.ok:
            right.barh(index, max(end, 0) / MIB, 0.25, color="white", edgecolor="black", hatch="////")
        text = "unavailable" if peak is None else f" {peak / MIB:,.1f}" + ("" if result.ok else f" ({result.outcome})")
        right.annotate(text, ((peak or 0) / MIB, index), va="center", xytext=(2, 0), textcoords="offset points", bbox=_ON_LINES)
    if story == "tensors":
        for budget in {result.budget for result in results if result.budget_given}:
            right.axvline(budget / MIB, color=BUDGET, lw=1.5, ls=(0, (6, 3)))
    right.set_yticks(range(len(results)), [textwrap.fill(result.label, 22, break_long_words=False) for result in results])
    right.invert_yaxis()
    right.set_xlim(right=right.get_xlim()[1] * 1.25 or 1)
    right.set_xlabel("MiB: bar = peak, hatched = at the end")
    right.spines[["top", "right"]].set_visible(False)
    return figure


def bundle(figure, text):
    """The figure as display data: a PNG, with its description for screen readers and plain terminals.

    The same picture as HTML comes along because JupyterLab ignores the alt text of a bare PNG; it prefers the HTML.
    labs/build.py leaves it out of committed notebooks: GitHub shows the PNG with its alt, but no picture inside HTML.
    Returns (data, metadata) for IPython.display.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=96, bbox_inches="tight", facecolor="white")
    png = base64.b64encode(buffer.getvalue()).decode()
    markup = f'<img alt="{html.escape(text)}" src="data:image/png;base64,{png}" style="max-width:100%">'
    return {"image/png": png, "text/html": markup, "text/plain": text}, {"image/png": {"alt": text}}


def _names(axes, upright=True):
    """{place: words} of an axis whose ticks are names, if need be those of a panel beside it; empty for an axis of numbers."""
    beside = axes.get_shared_y_axes() if upright else axes.get_shared_x_axes()
    for axis in [panel.yaxis if upright else panel.xaxis for panel in [axes, *beside.get_siblings(axes)]]:
        texts = [label.get_text() for label in axis.get_majorticklabels()]
        if any(re.search(r"[^\W\d]", text) and not text.startswith("$") for text in texts):
            return dict(zip(axis.get_majorticklocs(), texts))
    return {}


def _named(names, place):
    """The name nearest to a place, since grouped bars stand beside their tick; the number itself without names."""
    return names[min(names, key=lambda tick: abs(tick - place))] if names else f"{place:.4g}"


def _line_words(line, axes, label):
    """One line or set of points: by name, or from its first to its last point with the extremes between."""
    x, y = (np.asarray(values, dtype=float) for values in line.get_data(orig=False))
    if line.get_transform() is not axes.transData:  # axvline or axhline
        return f"{label} at {x[0] if x[0] == x[-1] else y[0]:.4g}"
    x, y = x[known := ~np.isnan(x + y)], y[known]
    if not len(x):
        return f"{label}: unavailable"
    if names := _names(axes):
        return f"{label}: " + ", ".join(f"{_named(names, place)} = {value:.4g}" for value, place in zip(x, y))
    if len(x) == 1:
        return f"{label}: {y[0]:.4g} at {x[0]:.4g}"
    words = f"{label} from {y[0]:.4g} at {x[0]:.4g} to {y[-1]:.4g} at {x[-1]:.4g}"
    margin = 0.02 * np.ptp(y)
    for word, at in (("highest", np.argmax(y)), ("lowest", np.argmin(y))):
        if min(abs(y[at] - y[0]), abs(y[at] - y[-1])) > margin:
            words += f", {word} {y[at]:.4g} at {x[at]:.4g}"
    return words


def _bar_words(axes):
    """All bars of a pair of axes: "series: name = value, name = value", then which is the largest."""
    bars = [container for container in axes.containers if isinstance(container, BarContainer) and container.patches]
    colour = lambda container: container.patches[0].get_facecolor()  # noqa: E731
    labels = {colour(container): container.get_label() for container in reversed(bars) if not container.get_label().startswith("_")}
    series, values = {}, {}
    for container in bars:
        flat = container.orientation == "horizontal"
        axis = axes.yaxis if flat else axes.xaxis
        # Ticks set by hand name the bars even where they are numbers.
        names = _names(axes, flat) or {tick: f"{tick:.4g}" for tick in axis.get_majorticklocs() if isinstance(axis.get_major_locator(), FixedLocator)}
        label = labels.get(colour(container), "")  # parts of a stack carry their label once, and the same colour
        for bar, value in zip(container.patches, container.datavalues):
            if flat and not names:  # one row of pieces: what counts is where they lie
                series.setdefault(label or ("hatched" if bar.get_hatch() else ""), []).append(f"{bar.get_x():.4g} to {bar.get_x() + value:.4g}")
                continue
            name = _named(names, bar.get_y() + bar.get_height() / 2 if flat else bar.get_x() + bar.get_width() / 2)
            known = not np.isnan(value)
            series.setdefault(label, []).append(f"{name} = {value:.4g}" if known else f"{name}: unavailable")
            values[f"{label}, {name}".removeprefix(", ")] = value if known else -np.inf
    words = [(f"{label}: " if label else "") + ", ".join(items) for label, items in series.items()]
    return words + ([f"largest: {max(values, key=values.get)}"] if len(values) > 1 else [])


def _axes_words(axes):
    """One pair of axes: title, what is measured over what, then the series and the marks."""
    quantity = lambda axis: axis.get_label_text() + " (logarithmic scale)" * (axis.get_scale() == "log")  # noqa: E731
    beside = [other.yaxis for other in axes.get_shared_y_axes().get_siblings(axes) if other.get_ylabel()]
    upright = quantity(axes.yaxis if axes.get_ylabel() or not beside else beside[0])
    parts = [axes.get_title() or axes.get_title(loc="left"), " over ".join(filter(None, [upright, quantity(axes.xaxis)]))]
    labelled = [(line, line.get_label()) for line in axes.get_lines()]
    labelled += [(container.lines[0], container.get_label()) for container in axes.containers if isinstance(container, ErrorbarContainer)]
    labelled = [(line, label) for line, label in labelled if not label.startswith("_")]
    parts += _bar_words(axes) + [_line_words(line, axes, label) for line, label in labelled]
    ends = {label: line.get_data(orig=False)[1][-1] for line, label in labelled if len(line.get_xdata()) > 2}
    if len(ends) > 1:
        parts.append(f"highest at the end: {max(ends, key=ends.get)}")
    marks = [text.get_text().strip() for text in axes.texts if re.search(r"[^\W\d]{3}", text.get_text())]
    return "; ".join(filter(None, [*parts, "marked: " + ", ".join(marks) if marks else ""]))


def describe(figure):
    """A figure in words, from its own titles, labels and data: what a screen reader is given for a notebook's plot."""
    words = [figure.get_suptitle(), *map(_axes_words, figure.axes), figure.get_supxlabel(), figure.get_supylabel()]
    return "Plot. " + " | ".join(filter(None, words))


def describe_plots():
    """From now on plt.show() in this notebook leaves the description with every picture."""
    from IPython import get_ipython

    shell = get_ipython()
    if getattr(shell, "kernel", None) is None:
        return
    import matplotlib_inline.backend_inline  # noqa: F401  registers its own formatter for figures, which this one replaces

    shell.display_formatter.formatters["image/png"].pop(Figure, None)
    shell.display_formatter.mimebundle_formatter.for_type(Figure, lambda figure: bundle(figure, describe(figure)))
