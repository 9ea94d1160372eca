"""Figures in words and as display data: what a screen reader, a plain terminal and a saved notebook are given."""

import base64
import io
import re

import numpy as np
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from labsupport.showing.cards import template
from labsupport.showing.palette import GROUND
from labsupport.showing.plain import plain

_IMAGE = template('<img alt="{{ text }}" src="data:image/png;base64,{{ png }}" style="max-width:100%">')
_TURNED = 0.02  # of a curve's range: an extreme that is nearer to one of the curve's ends is not told beside it


def bundle(figure, text):
    """The figure as display data: a PNG, with its description for screen readers and plain terminals.

    The same picture as HTML comes along because JupyterLab ignores the alt text of a bare PNG; it prefers the HTML.
    tools/build.py leaves it out of committed notebooks: GitHub shows the PNG with its alt, but no picture inside HTML.
    Returns (data, metadata) for IPython.display.
    """
    text, buffer = plain(text), io.BytesIO()
    figure.savefig(buffer, format="png", dpi=96, bbox_inches="tight", facecolor=GROUND)
    png = base64.b64encode(buffer.getvalue()).decode()
    data = {"image/png": png, "text/html": _IMAGE.render(text=text, png=png), "text/plain": text}
    return data, {"image/png": {"alt": text}}


def _ticks(axis):
    """{place: text} of an axis's ticks."""
    return dict(zip(axis.get_majorticklocs(), [label.get_text() for label in axis.get_majorticklabels()]))


def _names(axes, upright=True):
    """{place: words} of an axis whose ticks are names, if need be those of a panel beside it; empty for an axis of numbers."""
    beside = axes.get_shared_y_axes() if upright else axes.get_shared_x_axes()
    for axis in [panel.yaxis if upright else panel.xaxis for panel in [axes, *beside.get_siblings(axes)]]:
        ticks = _ticks(axis)
        if any(re.search(r"[^\W\d]", text) and not text.startswith("$") for text in ticks.values()):
            return ticks
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
    margin = _TURNED * np.ptp(y)
    for word, at in (("highest", np.argmax(y)), ("lowest", np.argmin(y))):
        if min(abs(y[at] - y[0]), abs(y[at] - y[-1])) > margin:
            words += f", {word} {y[at]:.4g} at {x[at]:.4g}"
    return words


def _marks_words(axes):
    """Marks without a line or a label, in rows that have names: of each row how many, and between which values."""
    names = _names(axes)
    for line in axes.get_lines():
        if names and line.get_label().startswith("_") and line.get_linestyle() == "None":
            x, y = (np.asarray(values, dtype=float) for values in line.get_data(orig=False))
            yield f"{_named(names, y.mean())}: {len(x)} marks from {x.min():.4g} to {x.max():.4g}"


def _bar_names(axes, flat):
    """{place: words} of the axis that bars stand on. Ticks set by hand name the bars even where they are numbers."""
    axis = axes.yaxis if flat else axes.xaxis
    by_hand = isinstance(axis.get_major_locator(), FixedLocator)
    return _names(axes, flat) or (_ticks(axis) if by_hand else {})


def _bar_words(axes):
    """All bars of a pair of axes: "series: name = value, name = value", then which is the largest."""
    bars = [container for container in axes.containers if isinstance(container, BarContainer) and container.patches]
    colours = [container.patches[0].get_facecolor() for container in bars]
    # Parts of a stack carry their label once, the first of them, and the same colour.
    labels = {
        colour: container.get_label()
        for colour, container in reversed([*zip(colours, bars)])
        if container.get_label()[:1] != "_"
    }
    series, values = {}, {}
    for colour, container in zip(colours, bars):
        flat, label = container.orientation == "horizontal", labels.get(colour, "")
        names = _bar_names(axes, flat)
        for bar, value in zip(container.patches, container.datavalues):
            if flat and not names:  # one row of pieces: what counts is where they lie
                piece = label or ("hatched" if bar.get_hatch() else "")
                series.setdefault(piece, []).append(f"{bar.get_x():.4g} to {bar.get_x() + value:.4g}")
                continue
            name = _named(names, bar.get_y() + bar.get_height() / 2 if flat else bar.get_x() + bar.get_width() / 2)
            known = not np.isnan(value)
            series.setdefault(label, []).append(f"{name} = {value:.4g}" if known else f"{name}: unavailable")
            values[f"{label}, {name}".removeprefix(", ")] = value if known else -np.inf
    words = [(f"{label}: " if label else "") + ", ".join(items) for label, items in series.items()]
    return words + ([f"largest: {max(values, key=values.get)}"] if len(values) > 1 else [])


def _axes_words(axes):
    """One pair of axes: title, what is measured over what, then the series and the marks."""
    quantity = lambda axis: axis.get_label_text() + " (logarithmic scale)" * (axis.get_scale() == "log")
    beside = [other.yaxis for other in axes.get_shared_y_axes().get_siblings(axes) if other.get_ylabel()]
    upright = quantity(axes.yaxis if axes.get_ylabel() or not beside else beside[0])
    parts = [
        axes.get_title() or axes.get_title(loc="left"),
        " over ".join(filter(None, [upright, quantity(axes.xaxis)])),
    ]
    errorbars = [container for container in axes.containers if isinstance(container, ErrorbarContainer)]
    labelled = [(line, line.get_label()) for line in axes.get_lines()]
    labelled += [(container.lines[0], container.get_label()) for container in errorbars if container.lines[0]]
    labelled = [(line, label) for line, label in labelled if not label.startswith("_")]
    parts += [*_bar_words(axes), *_marks_words(axes), *(_line_words(line, axes, label) for line, label in labelled)]
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
