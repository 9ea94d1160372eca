"""Still pictures of measured arms: curves, bars, budget line, phases. Every figure stays apart for colour-blind eyes."""

import math
import textwrap

from matplotlib import rc_context
from matplotlib.figure import Figure

from labsupport.ground.budget import MIB
from labsupport.ground.record import Cause
from labsupport.showing.palette import BUDGET_LINE, COLOURS, FIGURES, GROUND, INK, ON_LINES, PHASES, PROCESS, style
from labsupport.showing.plain import for_matplotlib

_ROOM = 1.12  # above the highest curve, for the words on it
_WAITED = 3  # seconds without a change before an OOM; below that a picture is to scale
_BETWEEN = 1  # second from such a wait to the next one, or to the end; what takes longer is no part of dying
_BEYOND = 1.05  # times its budget: an arm whose log does not tell what it asked for wanted more than there was
_FARTHEST = 2  # budgets: an arm that wanted more has its cross here, or the curves would lie on the axis
_NAMED = 0.05  # of the time axis that a phase must take; in a narrower one its name would overlap with the next


def _megabytes(curve):
    """[(seconds, bytes)] as the two lists that plot() takes, in MiB."""
    return [seconds for seconds, _ in curve], [size / MIB for _, size in curve]


def _without_wait(result, curve):
    """The curve up to where an OOM began to wait, and for how many seconds it did (0 if it hardly did).

    TensorFlow waits ten seconds before it raises, and once more if what was let go meanwhile does not suffice; drawn to
    scale, they would squeeze what happened before.
    """
    if result.ok or result.error.cause is not Cause.OOM or not curve:
        return curve, 0.0
    changes = [0, *(place for place in range(1, len(curve)) if curve[place][1] != curve[place - 1][1])]
    cut, until = len(curve) - 1, result.seconds
    for place, after in reversed([*zip(changes, [*(curve[place][0] for place in changes[1:]), result.seconds])]):
        if after < until - _BETWEEN:
            break
        if after - curve[place][0] > _WAITED:
            cut, until = place, curve[place][0]
    return curve[: cut + 1], result.seconds - until


def _curves(axes, results, story):
    """The memory curves of all arms on one pair of axes, and a cross where one of them died.

    The cross of an arm that ran out of memory stands at what it wanted: what it held may be let go by then.
    """
    ends = []
    for index, result in enumerate(results):
        curve, wait = _without_wait(result, getattr(result, story))
        if curve:
            cut = f" ({wait:.0f} s of waiting cut)" if wait else ""
            axes.plot(*_megabytes(curve), label=for_matplotlib(result.label) + cut, **style(index))
            if not result.ok:
                at, words = curve[-1][1], result.outcome
                if story == "tensors" and _ran_out(result):
                    wanted, most = _wanted(result), _FARTHEST * result.budget
                    at = min(wanted, most)
                    words += f", wanted {wanted / MIB:,.0f} MiB" * bool(result.wanted)
                ends.append((*curve[-1], at, style(index)["color"], words))
    middle = 0.5 * axes.get_xlim()[1]
    for seconds, size, at, colour, words in ends:
        axes.plot([seconds, seconds], [size / MIB, at / MIB], ":", color=colour, lw=1.5)
        axes.plot(seconds, at / MIB, "X", color=colour, ms=11, mec=INK, zorder=5)
        left, side = (-10, "right") if seconds > middle else (10, "left")
        axes.annotate(
            words,
            (seconds, at / MIB),
            xytext=(left, -6),
            textcoords="offset points",
            va="top",
            ha=side,
            fontweight="bold",
            bbox=ON_LINES,
        )
    axes.set(xlabel="time (s)", ylabel="tensor memory (MiB)" if story == "tensors" else "process memory added (MiB)")


def _from_zero(axes):
    """Both axes begin at zero; above the highest curve is room for words."""
    axes.set_xlim(left=0)
    axes.set_ylim(0, axes.get_ylim()[1] * _ROOM)


def _budget_lines(axes, results):
    """A line for each budget that was given; its name stands in the legend, since crosses and phases lie on the line."""
    for budget in {result.budget / MIB for result in results if result.budget_given}:
        axes.axhline(budget, color=BUDGET_LINE, lw=1.5, ls=(0, (6, 3)), label=f"budget {budget:,.0f} MiB")


def _shades(axes, phases):
    """The named parts of one arm behind its curve."""
    look = {
        "xycoords": ("data", "axes fraction"),
        "textcoords": "offset points",
        "va": "top",
        "fontsize": 8,
        "rotation": 90,
    }
    for index, phase in enumerate(phases):
        axes.axvspan(phase.start, phase.end, color=PHASES, alpha=0.30 if index % 2 else 0.15, lw=0)
        if phase.end - phase.start > _NAMED * axes.get_xlim()[1]:
            axes.annotate(for_matplotlib(phase.name), (phase.start, 0.98), xytext=(3, 0), **look)


def _ran_out(result):
    """Whether an arm died because TensorFlow's allocator had no room: memory outside of it is another axis."""
    tensors = (Cause.OOM, Cause.CRASH_OUT)
    return not result.ok and result.error.cause in tensors and result.figures["peak"] is not None


def _wanted(result):
    """Bytes that an arm which died of memory would have had in use with what it asked for; at least more than its budget."""
    return max(result.in_use + (result.wanted or 0), result.budget * _BEYOND)


def _bars(axes, results, story):
    """A bar for each arm's exact peak, and a hatched one for what was left at its end.

    The bar of an arm that ran out of memory goes on, empty, to what it wanted: its peak is where it was stopped.
    """
    peak_name, end_name = ("peak", "end") if story == "tensors" else ("process_peak", "process_end")
    for index, result in enumerate(results):
        peak, end, colour = result.figures[peak_name], result.figures[end_name], style(index)["color"]
        tip = peak or 0
        if peak is not None:
            axes.barh(index, peak / MIB, 0.7, color=colour, alpha=0.85)
            if story == "tensors" and _ran_out(result):
                tip = _wanted(result)
                axes.barh(index, (tip - peak) / MIB, 0.7, left=peak / MIB, fill=False, edgecolor=colour, ls=":", lw=1.5)
        if end is not None and result.ok:
            axes.barh(index, max(end, 0) / MIB, 0.25, color=GROUND, edgecolor=INK, hatch="////")
        words = " unavailable" if peak is None else f" {peak / MIB:,.1f}" + "+" * (not result.ok)
        words += "" if result.ok else f" ({result.outcome})"
        axes.annotate(words, (tip / MIB, index), va="center", xytext=(2, 0), textcoords="offset points", bbox=ON_LINES)
    if story == "tensors":
        for budget in {result.budget for result in results if result.budget_given}:
            axes.axvline(budget / MIB, color=BUDGET_LINE, lw=1.5, ls=(0, (6, 3)))
    axes.set_yticks(
        range(len(results)),
        [textwrap.fill(for_matplotlib(result.label), 22, break_long_words=False) for result in results],
    )
    axes.invert_yaxis()
    axes.set_xlim(right=axes.get_xlim()[1] * 1.25 or 1)  # room for the words behind the longest bar
    dotted = ", dotted = wanted" if story == "tensors" and any(map(_ran_out, results)) else ""
    axes.set_xlabel(f"MiB: bar = peak{dotted}, hatched = at the end")
    axes.grid(False)


def arm_figure(result):
    """One arm: tensor memory over time; the process's resident set as a thin grey line."""
    with rc_context(FIGURES):
        figure = Figure(figsize=(8, 2.9))
        axes = figure.subplots()
        _curves(axes, [result], "tensors")
        _budget_lines(axes, [result])
        curve, wait = _without_wait(result, result.tensors)
        end = curve[-1][0] if wait else math.inf
        if process := [point for point in result.process if point[0] <= end]:
            axes.plot(*_megabytes(process), color=PROCESS, lw=1, label="process (resident set)")
            axes.set_ylabel("memory (MiB)")
        if result.figures["peak"] is not None:
            axes.axhline(
                result.figures["peak"] / MIB,
                color=COLOURS[0],
                lw=1,
                ls=":",
                label=f"peak {result.peak_mib:,.1f} MiB (counter)",
            )
        _from_zero(axes)
        _shades(axes, [phase for phase in result.phases if phase.end <= end])
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        axes.set_title(f"{for_matplotlib(result.label)}: {result.outcome}")
    return figure


def compare_figure(results, story):
    """All arms: curves on one time and one byte axis on the left, exact peak and end as bars on the right."""
    with rc_context(FIGURES):
        figure = Figure(figsize=(9, 3.6 + 0.3 * max(len(results) - 3, 0)))
        left, right = figure.subplots(1, 2, width_ratios=[3, 2])
        _curves(left, results, story)
        if story == "tensors":
            _budget_lines(left, results)
        _from_zero(left)
        handles, labels = left.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside upper center", ncols=min(len(results), 3))
        _bars(right, results, story)
    return figure
