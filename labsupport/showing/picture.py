"""Still pictures of arms with matplotlib, readable on light and dark pages and for colour-blind eyes."""

import textwrap

from matplotlib.figure import Figure

from labsupport.ground.budget import MIB
from labsupport.showing.palette import BUDGET_LINE, COLOURS, PHASES, PROCESS, style

_ON_LINES = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}  # behind words that lie on curves


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
            axes.axhline(budget / MIB, color=BUDGET_LINE, lw=1.5, ls=(0, (6, 3)))
            axes.annotate(f"budget {budget / MIB:.0f} MiB", (0.99, budget / MIB), xycoords=("axes fraction", "data"), xytext=(0, 3),
                          textcoords="offset points", va="bottom", ha="right", color=BUDGET_LINE, bbox=_ON_LINES)  # fmt: skip
    if len(results) == 1:
        for index, phase in enumerate(results[0].phases):
            axes.axvspan(phase.start, phase.end, color=PHASES, alpha=0.30 if index % 2 else 0.15, lw=0)
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
        axes.plot([t for t, _ in result.process], [size / MIB for _, size in result.process], color=PROCESS, lw=1,
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
            right.axvline(budget / MIB, color=BUDGET_LINE, lw=1.5, ls=(0, (6, 3)))
    right.set_yticks(range(len(results)), [textwrap.fill(result.label, 22, break_long_words=False) for result in results])
    right.invert_yaxis()
    right.set_xlim(right=right.get_xlim()[1] * 1.25 or 1)
    right.set_xlabel("MiB: bar = peak, hatched = at the end")
    right.spines[["top", "right"]].set_visible(False)
    return figure
