"""Colours, line styles and signs: one place for all pictures and cards.

Okabe and Ito's palette stays apart for colour-blind readers (jfly.uni-koeln.de/color); line styles and signs say the
same a second time, so that nothing is told by colour alone.
"""

COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
LINES = ["-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 1))]
BUDGET_LINE = "#7F0000"
PHASES = "#56B4E9"  # the shade behind a named part of an arm
PROCESS = "#666666"  # the resident set, beside the tensors
GOOD, HALF, BAD, UNKNOWN = "#009E73", "#E69F00", "#D55E00", "#777777"


def style(index):
    """Colour and line style of the index-th arm, as keyword arguments of matplotlib."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index % len(LINES)]}
