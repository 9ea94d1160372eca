"""Colours, line styles, signs, and the look of every figure: one place for all pictures and cards.

Okabe and Ito's palette stays apart for colour-blind readers (jfly.uni-koeln.de/color); line styles and signs say the
same a second time, so that nothing is told by colour alone.
"""

from typing import NamedTuple

from cycler import cycler

COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
LINES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1))]
# Of the kinds of memory, in the order of peak/kinds.py, "unknown" grey: they lie side by side, so all of them stay apart, and
# black words are legible on each (7 : 1 nearly everywhere, 5.5 at least). Found by search, see tests/test_peak_shown.py.
PARTS = ["#EE4433", "#55DDFF", "#778877", "#77BB88", "#EECC33", "#BBFFAA", "#AA66FF", "#CC88BB", "#CCCCCC"]
GROUND, INK = "white", "black"  # of pictures: a saved one cannot follow the page's theme
BUDGET_LINE = "#7F0000"
PHASES = "#56B4E9"  # the shade behind a named part of an arm
PROCESS = "#666666"  # the resident set, beside the tensors
OUTLINE = "#999999"  # what is empty, or only leads the eye
FAINT = "#6B6B6B"  # words of less weight: 5.3 : 1 against white, of which WCAG asks 4.5


# Inches in a legend: a letter of its size at most, by trial, and the sign of an entry with the space behind it (matplotlib's
# legend.handlelength, handletextpad and columnspacing: 4.8 letters' heights).
_LETTER, _HANDLE = 0.075, 0.6


class Look(NamedTuple):
    """How good or bad news looks: a sign, and the colour of its card."""

    sign: str
    colour: str


GOOD, HALF, BAD = Look("✔", "#009E73"), Look("◐", "#E69F00"), Look("✘", "#D55E00")
UNKNOWN, TO_DO = Look("?", "#777777"), Look("✎", "#E69F00")
DIFFERENT = "≠"  # beside what came out in more than one way

ON_LINES = {"facecolor": GROUND, "edgecolor": "none", "alpha": 0.8, "pad": 1}  # behind words that lie on curves

# The look of every figure, as matplotlib's rcParams; the notebooks show no styling.
FIGURES = {
    "figure.figsize": (10, 3.6),
    "figure.facecolor": GROUND,
    "figure.constrained_layout.use": True,
    "axes.prop_cycle": cycler("color", COLOURS),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "grid.alpha": 0.3,
    "patch.edgecolor": GROUND,  # between bars that touch, and of their hatching
    "patch.force_edgecolor": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 2,
    "errorbar.capsize": 3,
}


def legend_below(axes):
    """The labels of a pair of axes below their whole figure, so that they hide nothing; as many in a row as fit."""
    handles, labels = axes.get_legend_handles_labels()
    if drawn := axes.get_legend():
        drawn.remove()
    columns = int(axes.figure.get_figwidth() // (max(map(len, labels)) * _LETTER + _HANDLE))
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def style(index):
    """Colour and line style of the index-th arm, as keyword arguments of matplotlib."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}
