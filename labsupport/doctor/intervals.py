"""Steps and what runs between them: the level of tensor memory before each, and the most that one adds."""

from labsupport.ground.record import Interval, Step

# Levels kept of one kind of step: enough for medians of thirds, few enough to send them several times a second.
_MOST_LEVELS = 400


class Intervals:
    """At most one interval is open; beginning another ends it. Levels are bytes from the allocator's counters."""

    def __init__(self, gauge):
        self._gauge = gauge
        self.steps = {}  # name: Step
        self.total = 0  # steps of all kinds
        self.open = None
        self.failed = None  # the interval in which an exception began

    def begin(self, kind, name):
        """kind: "step" or "input"."""
        level, peak = self._gauge.lap()  # to read the allocator costs a loop of small steps most of what we do there
        self._close(peak)
        self.open = Interval(kind, name, level)

    def begin_step(self, name, kind="step"):
        """kind: "step", or "input" in a loop over batches in which nothing else is a step."""
        step = self.steps.get(name)
        if step is None:
            step = self.steps[name] = Step(name, kind)
        self.begin(kind, name)
        step.count += 1
        self.total += 1
        if (step.count - 1) % step.every == 0 and self.open.level is not None:
            step.levels.append((step.count, self.open.level))
            if len(step.levels) > _MOST_LEVELS:
                step.levels, step.every = step.levels[::2], 2 * step.every

    def end(self):
        """End the interval that is open, if one is."""
        if self.open is not None:
            self._close(self._gauge.lap_peak())

    def _close(self, peak):
        """peak: bytes, the most in use since the open interval began."""
        ended, self.open = self.open, None
        if ended is not None and ended.kind == "step" and ended.level is not None:
            step = self.steps[ended.name]
            step.rise = max(step.rise, peak - ended.level)

    def note_failure(self):
        """Remember the interval in which an exception began, before unwinding closes it."""
        if self.failed is None and self.open is not None:
            peak = self._gauge.lap_peak()
            self.failed = Interval(self.open.kind, self.open.name, self.open.level, peak)
