"""The live memory plot: a widget that moves while an arm runs, and leaves a still picture behind.

Drawn as SVG text, not with matplotlib: a redraw costs well under a millisecond, where a PNG would take
a tenth of a core away from the arm that is being measured. It also takes the colour of the text around it, in whatever theme.
"""

import html
import sys
import threading
import time

from matplotlib.ticker import MaxNLocator

from labsupport.ground.budget import MIB, mib
from labsupport.ground.record import Phase

REDRAW_SECONDS = 0.3
_W, _H, _LEFT, _BOTTOM, _TOP = 720, 240, 62, 34, 14


def _thin(points, most=240):
    """At most `most` points; of each group the highest, so that thinning never hides a peak."""
    step = max(1, len(points) // most)
    return [max(points[i : i + step], key=lambda p: p[1]) for i in range(0, len(points), step)]


def svg(result, elapsed):
    """The plot of an unfinished arm as an <svg> string."""
    highest = max([16 * MIB] + [size for _, size in result.tensors] + [size for _, size in result.process])
    top = max(highest, result.budget if result.budget_given else 0) * 1.12 / MIB
    end = max(4.0, elapsed * 1.05)
    x = lambda seconds: _LEFT + seconds / end * (_W - _LEFT - 10)  # noqa: E731
    y = lambda size: _H - _BOTTOM - size / MIB / top * (_H - _BOTTOM - _TOP)  # noqa: E731
    floor = _H - _BOTTOM
    label = (
        f"Live memory plot of {result.label}: {elapsed:.1f} seconds, tensors "
        f"{mib(result.tensors[-1][1] if result.tensors else None)}, budget {mib(result.budget)}"
    )
    out = [
        f'<svg viewBox="0 0 {_W} {_H}" width="100%" style="max-width:{_W}px" role="img" '
        f'aria-label="{html.escape(label)}" font-family="sans-serif" font-size="12" fill="currentColor">'
    ]
    running = [Phase(name, start, elapsed, None, None, None) for name, start in result.open_phases]
    for index, phase in enumerate(result.phases + running):
        out.append(
            f'<rect x="{x(phase.start):.1f}" y="{_TOP}" width="{max(x(phase.end) - x(phase.start), 0.5):.1f}" '
            f'height="{floor - _TOP}" fill="#56B4E9" opacity="{0.35 if index % 2 else 0.18}">'
            f"<title>{html.escape(phase.name)}</title></rect>"
        )
        if phase.end - phase.start > 0.1 * end:
            out.append(f'<text x="{x(phase.start) + 3:.1f}" y="{_TOP + 12}">{html.escape(phase.name)}</text>')
    for tick in MaxNLocator(5).tick_values(0, top):
        if 0 <= tick <= top:
            out.append(
                f'<line x1="{_LEFT}" x2="{_W - 10}" y1="{y(tick * MIB):.1f}" y2="{y(tick * MIB):.1f}" '
                f'stroke="currentColor" opacity="0.2"/>'
                f'<text x="{_LEFT - 6}" y="{y(tick * MIB) + 4:.1f}" text-anchor="end">{tick:,.0f}</text>'
            )
    for tick in MaxNLocator(8, integer=True).tick_values(0, end):
        if 0 <= tick <= end:
            out.append(f'<text x="{x(tick):.1f}" y="{floor + 15}" text-anchor="middle">{tick:.0f}</text>')
    out.append(f'<text x="{(_W + _LEFT) / 2}" y="{_H - 3}" text-anchor="middle">time (s)</text>')
    out.append(f'<text transform="translate(13 {floor / 2 + 20}) rotate(-90)" text-anchor="middle">memory added (MiB)</text>')
    for points, look in ((result.process, 'stroke="#888" stroke-width="1"'), (result.tensors, 'stroke="#D55E00" stroke-width="2.5"')):
        path = " ".join(f"{x(t):.1f},{y(max(size, 0)):.1f}" for t, size in _thin(points))
        out.append(f'<polyline points="{path}" fill="none" {look}/>')
    if result.budget_given:
        out.append(
            f'<line x1="{_LEFT}" x2="{_W - 10}" y1="{y(result.budget):.1f}" y2="{y(result.budget):.1f}" '
            f'stroke="#E03C31" stroke-width="1.5" stroke-dasharray="7 4"/>'
            f'<text x="{_W - 12}" y="{y(result.budget) - 4:.1f}" text-anchor="end">budget {mib(result.budget)}</text>'
        )
    return "".join(out) + "</svg>"


def _waiting(result, elapsed):
    """A hint when the curve has stood still high up for two seconds; what the allocator does then is not visible."""
    recent = [size for t, size in result.tensors if t > elapsed - 2]
    if elapsed > 3 and recent and min(recent) == max(recent) and recent[-1] > result.budget / 2:
        return " · unchanged for 2 s: when a tensor does not fit, TensorFlow waits 10 s for memory before it gives up"
    return ""


class TerminalPlot:
    """Without a notebook: one line, rewritten in place on a terminal, nothing when the output is a file."""

    stopped = False

    def hear(self, kind, text):
        """What the arm writes, as it comes; here it waits for the end."""

    def update(self, result, elapsed, started):
        if sys.stderr.isatty():
            now = mib(result.tensors[-1][1]) if result.tensors else "starting"
            print(f"\r{result.label}: {elapsed:.0f} s, tensors {now} ", end="", file=sys.stderr, flush=True)

    def finish(self, result):
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        print(result)

    def abandon(self):
        pass


class NotebookPlot:
    """In a notebook: the SVG in an HTML widget with a status line and a Stop button.

    quiet=True leaves one line of text behind in place of the picture (for sweeps over many arms).
    """

    def __init__(self, quiet):
        import ipywidgets
        from IPython.display import display

        self._quiet = quiet
        self._stop = threading.Event()
        self._drawn = 0.0
        self._plot = ipywidgets.HTML()
        self._status = ipywidgets.HTML("starting a fresh Python process with TensorFlow …")
        button = ipywidgets.Button(description="Stop this run", icon="stop", tooltip="End the process of this run now; interrupting the kernel (I, I) does it too")
        # The kernel is busy with this cell; JupyterLab 4.4+ delivers the click through a subshell thread.
        button.on_click(lambda _: self._stop.set())
        row = ipywidgets.HBox([button, self._status])
        self._box = ipywidgets.VBox([row] if quiet else [self._plot, row])
        self._handle = display(self._box, display_id=True)

    @property
    def stopped(self):
        return self._stop.is_set()

    def hear(self, kind, text):
        """What the arm writes waits for the end: printing now would fight with the widget over the cell's output."""

    def update(self, result, elapsed, started):
        if time.monotonic() - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = time.monotonic()
        if not started:
            self._status.value = f"{html.escape(result.label)}: starting a fresh Python process with TensorFlow … {elapsed:.0f} s"
            return
        now, peak = (f(size for _, size in result.tensors) if result.tensors else None for f in (lambda s: list(s)[-1], max))
        self._status.value = (
            f"{html.escape(result.label)}: {elapsed:.1f} s · tensors {mib(now)}, highest sample {mib(peak)}"
            + _waiting(result, elapsed)
        )
        if not self._quiet:
            self._plot.value = svg(result, elapsed)

    def finish(self, result):
        from labsupport.showing.picture import arm_figure
        from labsupport.showing.words import bundle

        if self._quiet:
            data, metadata = {"text/plain": str(result)}, {}
        else:
            data, metadata = bundle(arm_figure(result), str(result))
        # Replacing the widget's own output means that the saved notebook holds a picture, not a dead widget.
        self._handle.update(data, metadata=metadata, raw=True)
        self._box.close()
        if not result.ok and not self._quiet:
            from IPython.display import display

            display(result.error)

    def abandon(self):
        """The cell was interrupted: leave a note where the plot was."""
        self._handle.update({"text/plain": "interrupted; the process of this run was ended"}, raw=True)
        self._box.close()


def plot_for(quiet):
    """The plot that fits where this code runs."""
    try:
        from IPython import get_ipython
    except ImportError:
        return TerminalPlot()
    return NotebookPlot(quiet) if getattr(get_ipython(), "kernel", None) else TerminalPlot()
