"""A stacked curve: which kinds of memory an arm held over the time of its look, and where its worst moment was."""

from labsupport.ground.budget import MIB
from labsupport.peak.kinds import KINDS
from labsupport.showing.palette import BUDGET_LINE, INK, ON_LINES, OUTLINE, PARTS

COLOUR_OF = dict(zip(KINDS, PARTS))
_ROOM = 1.05  # above the highest level
_LOW = 0.7  # of the picture's height: above that is no room for words
_NEAR = 0.75  # of the time: words to the right of what lies later would leave the picture


def stacked(axes, arm, budgets, top):
    """Draw the Parts of one arm on `axes`, up to `top` MiB; budgets: bytes, each a dashed line."""
    seen = arm.over_time
    kinds = [kind for kind in KINDS if kind in seen]
    seconds = [*seen.index]
    if kinds:
        sizes = [seen[kind] for kind in kinds]
        # Between two points of the curve nothing is known but that no more was in use: steps, no slopes.
        colours = [COLOUR_OF[kind] for kind in kinds]
        axes.stackplot(seconds, *sizes, colors=colours, edgecolor=OUTLINE, lw=0.3, step="post")
    for budget in set(budgets):
        axes.axhline(budget / MIB, color=BUDGET_LINE, lw=1.5, ls=(0, (6, 3)))
    axes.set(xlim=(0, seconds[-1] if len(seconds) > 1 and seconds[-1] > 0 else 1), ylim=(0, top * _ROOM), ylabel="MiB")
    if kinds:
        _mark(axes, seconds, seen.sum(axis=1), arm)
    axes.tick_params(labelsize=9)
    axes.set_xlabel("seconds of a second run, in which every allocation was recorded", fontsize=9, labelpad=1)


def _mark(axes, seconds, sums, arm):
    """A line at the worst moment, with what was asked for there on top."""
    worst = seconds[-1] if arm.asked else sums.idxmax()
    asked = arm.asked.size / MIB if arm.asked else 0
    height = sums.iloc[-1] if arm.asked else sums.max()
    axes.plot([worst, worst], [0, height + asked], color=INK, lw=1.2, ls=":" if asked else "-")
    axes.plot([worst], [height + asked], "X" if asked else "v", color=INK, ms=8, clip_on=False)
    late = worst > _NEAR * max(seconds[-1], 1e-9)
    side, gap = ("right", -8) if late else ("left", 8)
    words = "what it wanted here had no room" if asked else "worst moment, below"
    low = height + asked < _LOW * axes.get_ylim()[1]
    place = {"xytext": (gap, 3 if low else -2), "textcoords": "offset points", "ha": side}
    place["va"] = "bottom" if low else "top"
    axes.annotate(words, (worst, height + asked), fontsize=9, bbox=ON_LINES, **place)
