"""Steps as the doctor notes them, on an allocator of numbers."""

from labsupport.doctor.intervals import Intervals
from labsupport.ground.record import Kind


class Gauge:
    """Memory that a step takes and gives back, and what it leaves."""

    def __init__(self):
        self.level = self.peak = self.reads = 0

    def lap(self):
        peak, self.peak, self.reads = self.peak, self.level, self.reads + 1
        return self.level, peak

    def lap_peak(self):
        self.reads += 1
        return self.peak

    def step(self, takes, leaves):
        self.peak = max(self.peak, self.level + takes)
        self.level += leaves


def noted(number, takes, leaves, batch=0):
    """(gauge, Intervals) after so many steps; batch: bytes that a batch takes behind each of them, where there is one."""
    gauge = Gauge()
    intervals = Intervals(gauge)
    for _ in range(number):
        intervals.begin_step(Kind.FUNCTION, name="f")
        gauge.step(takes, leaves)
        if batch:
            intervals.begin(Kind.BATCH)
            gauge.step(takes=batch, leaves=0)
            intervals.end()
    return gauge, intervals


def test_many_steps_are_counted_and_few_are_read():
    gauge, intervals = noted(20_000, takes=100, leaves=1)
    step = intervals.steps["f"]
    assert (step.count, intervals.total) == (20_000, 20_000)
    assert all(level == number - 1 for number, level in step.levels) and step.levels[-1][0] > 19_000
    assert step.rise == 100  # of single steps, though most are not read
    assert gauge.reads < 4_000
    assert 19_000 < intervals.open.level <= gauge.level
    gauge.step(takes=500, leaves=0)
    intervals.note_failure()
    assert intervals.failed.peak == gauge.level + 500
    intervals.end()
    assert intervals.open is None and step.rise == 100


def test_what_runs_between_steps_ends_them():
    _, intervals = noted(1_000, takes=10, leaves=0, batch=1_000)
    assert intervals.steps["f"].rise == 10
