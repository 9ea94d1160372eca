"""The live memory plot: a widget that moves while an arm runs, and leaves a still picture behind.

Drawn as SVG text, not with matplotlib: a redraw costs about a millisecond, where a PNG would take
a tenth of a core away from the arm that is being measured. Its ground is white in every theme, as that of the still picture.
"""

import math
import sys
import threading
import time
from dataclasses import dataclass

from labsupport.ground.budget import MIB, mib
from labsupport.ground.record import Watcher
from labsupport.showing.cards import as_html, show_error, show_widget, template
from labsupport.showing.palette import BUDGET_LINE, COLOURS, GROUND, INK, PHASES, PROCESS
from labsupport.showing.plain import plain, say

REDRAW_SECONDS = 0.3  # three pictures a second look alive; each goes through the notebook's server
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP = 720, 240, 62, 710, 14  # units of the drawing, and where the axes lie in it
_FLOOR = 206
_POINTS = 240  # of a curve: one for less than three units of the axis
_LOWEST, _SHORTEST = 16 * MIB, 4.0  # bytes and seconds that the axes show at least; below would be a plot of noise
_LETTER = 7.0  # units of the drawing that a letter takes at most, for whether a phase's name fits into its time

_SVG = template(
    """\
<svg viewBox="0 0 {{ width }} {{ height }}" width="100%" style="max-width:{{ width }}px;background:{{ ground }};color:{{ ink }}" role="img" aria-label="{{ label }}"
 font-family="sans-serif" font-size="12" fill="currentColor">
{% for phase in phases %}
<rect x="{{ phase.x }}" y="{{ top }}" width="{{ phase.width }}" height="{{ floor - top }}" fill="{{ phase.colour }}" opacity="{{ phase.opacity }}">
<title>{{ phase.name }}</title></rect>
{% if phase.named %}<text x="{{ phase.x + 3 }}" y="{{ top + 12 }}">{{ phase.name }}</text>{% endif %}
{% endfor %}
{% for y, words in levels %}
<line x1="{{ left }}" x2="{{ right }}" y1="{{ y }}" y2="{{ y }}" stroke="currentColor" opacity="0.2"/>
<text x="{{ left - 6 }}" y="{{ y + 4 }}" text-anchor="end">{{ words }}</text>
{% endfor %}
{% for x, words in times %}<text x="{{ x }}" y="{{ floor + 15 }}" text-anchor="middle">{{ words }}</text>{% endfor %}
<text x="{{ (width + left) / 2 }}" y="{{ height - 3 }}" text-anchor="middle">time (s)</text>
<text transform="translate(13 {{ floor / 2 + 20 }}) rotate(-90)" text-anchor="middle">memory added (MiB)</text>
{% for points, colour, thick in curves %}<polyline points="{{ points }}" fill="none" stroke="{{ colour }}" stroke-width="{{ thick }}"/>{% endfor %}
{% if budget %}
<line x1="{{ left }}" x2="{{ right }}" y1="{{ budget.y }}" y2="{{ budget.y }}" stroke="{{ budget.colour }}" stroke-width="1.5" stroke-dasharray="7 4"/>
<text x="{{ right - 2 }}" y="{{ budget.y - 4 }}" text-anchor="end">{{ budget.words }}</text>
{% endif %}
</svg>"""
)


_LINE = template("<pre>{{ text }}</pre>")


@dataclass(frozen=True)
class _Axes:
    """Where seconds up to `end` and bytes up to `top` lie in the drawing."""

    end: float
    top: float

    def x(self, seconds):
        return round(_LEFT + seconds / self.end * (_RIGHT - _LEFT), 1)

    def y(self, size):
        return round(_FLOOR - max(size, 0) / self.top * (_FLOOR - _TOP), 1)

    def path(self, points):
        """A curve of at most about _POINTS points; of each group the highest, so that thinning never hides a peak."""
        step = max(1, len(points) // _POINTS)
        highest = (max(points[i : i + step], key=lambda point: point[1]) for i in range(0, len(points), step))
        return " ".join(f"{self.x(seconds)},{self.y(size)}" for seconds, size in highest)

    def shades(self, phases):
        """phases: [(name, start, end)] → what the template draws behind the curves."""
        return [
            {
                "name": name,
                "x": self.x(start),
                "width": max(round(self.x(end) - self.x(start), 1), 0.5),
                "colour": PHASES,
                "opacity": 0.35 if index % 2 else 0.18,
                "named": self.x(end) - self.x(start) > _LETTER * len(name),
            }
            for index, (name, start, end) in enumerate(phases)
        ]


def _ticks(end, most):
    """Whole numbers from 0 to `end`, at most `most` steps of 1, 2 or 5 times a power of ten."""
    power = 10 ** max(0, math.floor(math.log10(end / most)))
    step = next(power * times for times in (1, 2, 5, 10) if power * times * most >= end)
    return range(0, math.floor(end) + 1, step)


def svg(result, elapsed):
    """The plot of an unfinished arm as an <svg> string."""
    sizes = [size for _, size in [*result.tensors, *result.process]]
    highest = max([_LOWEST, *sizes, result.budget if result.budget_given else 0])
    axes = _Axes(max(_SHORTEST, elapsed * 1.05), highest * 1.12)  # a little room on the right, and words above
    phases = [(phase.name, phase.start, phase.end) for phase in result.phases]
    phases += [(name, start, elapsed) for name, start in result.open_phases]
    now = mib(result.tensors[-1][1] if result.tensors else None)
    budget = {"y": axes.y(result.budget), "words": f"budget {mib(result.budget)}", "colour": BUDGET_LINE}
    return _SVG.render(
        ground=GROUND,
        ink=INK,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_RIGHT,
        top=_TOP,
        floor=_FLOOR,
        label=f"Live memory plot of {result.label}: {elapsed:.1f} seconds, tensors {now}, budget {mib(result.budget)}",
        phases=axes.shades(phases),
        levels=[(axes.y(tick * MIB), f"{tick:,}") for tick in _ticks(axes.top / MIB, 5)],
        times=[(axes.x(tick), f"{tick}") for tick in _ticks(axes.end, 8)],
        curves=[(axes.path(result.process), PROCESS, 1), (axes.path(result.tensors), COLOURS[0], 2.5)],
        budget=budget if result.budget_given else None,
    )


def in_line(place):
    """Why an arm has not begun, and which it is of those that wait."""
    ending = "th" if place % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(place % 10, "th")
    return f"waiting until this machine has a core and memory for it: {place}{ending} in line"


def _waiting(result, elapsed):
    """A hint when the curve has stood still high up for two seconds; what the allocator does then is not visible.

    Ten seconds: kMaxMillisToWait of BFCAllocator::AllocateRaw in TensorFlow's tsl/framework/bfc_allocator.cc.
    """
    recent = [size for t, size in result.tensors if t > elapsed - 2]
    if elapsed > 3 and recent and min(recent) == max(recent) and recent[-1] > result.budget / 2:
        return " · unchanged for 2 s: when a tensor does not fit, TensorFlow waits 10 s for memory before it gives up"
    return ""


class TerminalPlot(Watcher):
    """Without a notebook: one line, rewritten in place on a terminal; nothing when the output is a file. Ctrl+C ends the run."""

    def wait(self, label, place):
        if sys.stderr.isatty():
            say(f"\r{plain(label)}: {in_line(place)} ", end="", file=sys.stderr)

    def update(self, result, elapsed, started):
        if sys.stderr.isatty():
            now = mib(result.tensors[-1][1]) if result.tensors else "starting"
            say(f"\r{plain(result.label)}: {elapsed:.0f} s, tensors {now} ", end="", file=sys.stderr)

    def finish(self, result):
        self.abandon()
        say(plain(str(result)))

    def abandon(self):
        """Leave a clean line behind."""
        if sys.stderr.isatty():
            say("\r\033[K", end="", file=sys.stderr)


# What is read under a plot that does not move any more, and where a page has no widgets.
_AWAY = "Nothing moves here after the kernel was restarted: then run this cell again, after those above it."


class NotebookPlot(Watcher):
    """In a notebook: the SVG in an HTML widget with a status line and a Stop button.

    quiet=True leaves one line of text behind in place of the picture (for sweeps over many arms). What the arm writes waits
    for its end: printed now, it would fight with the widget over the cell's output.
    """

    def __init__(self, quiet):
        import ipywidgets

        self._quiet = quiet
        self._stop = threading.Event()
        self._drawn = 0.0
        self._plot = ipywidgets.HTML()
        self.status = ipywidgets.HTML("starting a fresh Python process with TensorFlow …")
        button = ipywidgets.Button(
            description="Stop this run",
            icon="stop",
            tooltip="End the process of this run now; interrupting the kernel (I, I) does it too",
            layout={"width": "auto", "flex": "0 0 auto"},  # however narrow the page: what it says is seen whole
        )
        # The kernel is busy with this cell; JupyterLab 4.4+ delivers the click through a subshell thread.
        button.on_click(lambda _: self._stop.set())
        row = ipywidgets.HBox([button, self.status])
        note = ipywidgets.HTML(f"<small>{_AWAY}</small>")
        self._box = ipywidgets.VBox([row, note] if quiet else [self._plot, row, note])
        self._handle = show_widget(self._box, _AWAY)

    @property
    def stopped(self):
        return self._stop.is_set()

    def wait(self, label, place):
        """Say so, where it has changed: a screen reader may be reading it."""
        words = as_html(f"{label}: {in_line(place)}")
        if self.status.value != words:
            self.status.value = words

    def update(self, result, elapsed, started):
        """Draw anew, if REDRAW_SECONDS have passed since the last time."""
        if time.monotonic() - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = time.monotonic()
        if not started:
            self.status.value = as_html(
                f"{result.label}: starting a fresh Python process with TensorFlow … {elapsed:.0f} s"
            )
            return
        sizes = [size for _, size in result.tensors] or [None]
        highest = None if sizes[-1] is None else max(sizes)
        status = f"{result.label}: {elapsed:.1f} s · tensors {mib(sizes[-1])}, highest sample {mib(highest)}"
        self.status.value = as_html(status + _waiting(result, elapsed))
        if not self._quiet:
            self._plot.value = svg(result, elapsed)

    def finish(self, result):
        """Leave the picture, and why the arm did not finish; the quiet plot only its line."""
        if self._quiet:
            self._leave({"text/plain": plain(str(result))})
            return
        from labsupport.showing.picture import (
            arm_figure,
        )  # here, since the doctor draws no picture and shall start fast
        from labsupport.showing.words import bundle

        self._leave(*bundle(arm_figure(result), str(result)))
        if not result.ok:
            show_error(result.error)

    def abandon(self):
        """The cell was interrupted: leave a note where the plot was."""
        self._leave({"text/plain": "interrupted; the process of this run was ended"})

    def _leave(self, data, metadata=None):
        # Replacing the widget's own output means that the saved notebook holds a picture, not a dead widget. A page that was
        # closed meanwhile knows the widget alone, and finds the same in it as long as the kernel runs.
        import ipywidgets

        self._handle.update(data, metadata=metadata or {}, raw=True)
        self._box.children = [ipywidgets.HTML(data.get("text/html") or _LINE.render(text=data["text/plain"]))]


def plot_for(quiet):
    """The Watcher that fits where this code runs."""
    try:
        from IPython import get_ipython
    except ImportError:
        return TerminalPlot()
    return NotebookPlot(quiet) if getattr(get_ipython(), "kernel", None) else TerminalPlot()
