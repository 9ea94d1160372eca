"""Steps and what runs between them: the level of tensor memory before each, and the most that one adds."""

from msgspec import structs

from labsupport.ground.record import Interval, Step, in_words

# Levels kept of one kind of step: enough for medians of thirds, few enough to send them several times a second.
_MOST_LEVELS = 400


class Intervals:
    """At most one interval is open; beginning another ends it. Levels are bytes from the allocator's counters.

    To read these costs a loop of small steps most of what we do there. So where a kind of step has been seen so often that
    its levels are thinned out, those between are only counted: such a one has the level that was read last.
    """

    def __init__(self, gauge):
        self._gauge = gauge
        self.steps = {}  # name: Step
        self.total = 0  # steps of all kinds
        self.open = None
        self.failed = None  # the interval in which an exception began
        self._level, self._was_read = None, True  # what was read last, and whether at the begin of the open interval

    @property
    def in_turn(self):
        """Whether the last step is one of 1, 2, 4, 8, …, at which what is alive is counted: the cost stays small, the last half is seen."""
        return self.total & (self.total - 1) == 0

    def begin(self, kind, place="", name=""):
        """kind: a Kind; place: the line of the script; name: where it is not that of its kind."""
        self._level, peak = self._gauge.lap()
        self._close(peak)
        self.open = Interval(name or kind.value, kind, self._level, place=place)

    def begin_step(self, kind, place="", name=""):
        """The same, counted as a step; name: where it is not that of its kind and place."""
        name = name or f"{kind} ({in_words(place)})"
        step = self.steps.get(name)
        if step is None:
            step = self.steps[name] = Step(name, kind, place)
        step.count += 1
        self.total += 1
        of_levels = (step.count - 1) % step.every == 0
        if not (of_levels or self.in_turn):
            self.end()
            self.open, self._was_read = Interval(name, kind, self._level, place=place), False
            return
        self.begin(kind, place, name)
        if of_levels and self._level is not None:
            step.levels.append((step.count, self._level))
            if len(step.levels) > _MOST_LEVELS:
                step.levels, step.every = step.levels[::2], 2 * step.every

    def end(self):
        """End the interval that is open, if one is."""
        if self.open is not None:
            self._close(self._gauge.lap_peak() if self._was_read else None)

    def _close(self, peak):
        """peak: bytes, the most in use since the open interval began; of one that was not read it is not known."""
        ended, self.open = self.open, None
        if ended is not None and self._was_read and not ended.kind.of_input and ended.level is not None:
            step = self.steps[ended.name]
            step.rise = max(step.rise, peak - ended.level)
        self._was_read = True

    def note_failure(self):
        """Remember the interval in which an exception began, before unwinding closes it."""
        if self.failed is None and self.open is not None:
            self.failed = structs.replace(self.open, peak=self._gauge.lap_peak())
