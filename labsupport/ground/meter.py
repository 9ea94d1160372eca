"""Counters and samples. Peaks come from counters, curves from samples; what cannot be read is None.

Two counters tell two stories. "tensors" is what TensorFlow's allocator has handed out. "process" is the
resident set, which also holds Python, NumPy and graphs, and keeps freed tensor memory in the pool.
"""

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from labsupport.ground.budget import in_mib, process_status

SAMPLE_SECONDS = 0.04
SLOWEST_SAMPLE_SECONDS = 0.15


@dataclass
class Reading:
    """Memory at one moment, in MiB over the level at the arm's start; None where it cannot be read."""

    tensors_mib: float | None
    process_mib: float | None


@dataclass
class Phase:
    """One `with phase(name):` block: seconds since the arm's start; bytes over the level at the arm's start.

    level, peak, held: in use when the block began, at most within it, and when it ended; None if unavailable.
    """

    name: str
    start: float
    end: float
    level: int | None
    peak: int | None
    held: int | None

    @property
    def level_mib(self):
        """Tensor memory in use when the block began, MiB over the arm's start."""
        return in_mib(self.level)

    @property
    def peak_mib(self):
        """Most tensor memory in use within the block, MiB over the arm's start."""
        return in_mib(self.peak)

    @property
    def held_mib(self):
        """Tensor memory in use when the block ended, MiB over the arm's start."""
        return in_mib(self.held)

    @property
    def rise_mib(self):
        """What the block added at its worst moment: its peak over the level at which it began, MiB."""
        return None if self.peak is None else in_mib(self.peak - self.level)

    @property
    def added_mib(self):
        """What the block left behind: held at its end over the level at which it began, MiB."""
        return None if self.held is None else in_mib(self.held - self.level)


def _high_water():
    """Bytes: the largest resident set of this process so far (VmHWM; getrusage where there is no /proc)."""
    mark = process_status("VmHWM")
    if mark is None:
        try:
            import resource
            import sys

            unit = 1 if sys.platform == "darwin" else 1024
            mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        except ImportError:
            pass
    return mark


@dataclass
class Meter:
    """The exact counters of the process it lives in, over the level when it was started."""

    tf: object
    device: str
    zero: float = 0.0
    tensors_zero: int | None = None
    process_zero: int = 0
    phases: list = field(default_factory=list)
    # The allocator has one peak, which phases and laps reset: each window keeps the highest peak since it was opened.
    _windows: list = field(default_factory=lambda: [[0], [0]])  # of the whole arm, of the lap
    _mark: int | None = None
    _mark_was_reset: bool = False

    def start(self):
        """Set the zero level. Peaks count from here."""
        try:  # "5" resets VmHWM (Linux, man proc_pid_clear_refs); refused in some containers
            Path("/proc/self/clear_refs").write_text("5")
            self._mark_was_reset = True
        except OSError:
            pass
        self._mark = _high_water()
        self.process_zero = psutil.Process().memory_info().rss
        stats = self._stats()
        if stats:
            self.tf.config.experimental.reset_memory_stats(self.device)
            self.tensors_zero = stats["current"]
            self._windows = [[stats["current"]], [stats["current"]]]
        self.zero = time.monotonic()

    def _stats(self):
        try:
            return self.tf.config.experimental.get_memory_info(self.device)
        except (ValueError, self.tf.errors.OpError):  # this allocator keeps no statistics
            return None

    def tensors_now(self):
        """Bytes the allocator has handed out now, over the zero level."""
        stats = self._stats()
        return None if stats is None or self.tensors_zero is None else stats["current"] - self.tensors_zero

    def tensors_peak(self):
        """Bytes: the allocator's peak since start()."""
        return None if self._fold() is None else self._windows[0][0] - self.tensors_zero

    def _fold(self):
        """Let every open window have the peak so far, then start the allocator's own peak anew; bytes in use, or None."""
        stats = self._stats()
        if stats is None or self.tensors_zero is None:
            return None
        for window in self._windows:
            window[0] = max(window[0], stats["peak"])
        self.tf.config.experimental.reset_memory_stats(self.device)
        return stats["current"]

    def lap(self):
        """(bytes in use now, peak in bytes since the last lap), over the zero level; (None, None) if unavailable."""
        now = self._fold()
        if now is None:
            return None, None
        peak, self._windows[1][0] = self._windows[1][0], now
        return now - self.tensors_zero, peak - self.tensors_zero

    def process_now(self):
        """Bytes of the resident set over the zero level."""
        return psutil.Process().memory_info().rss - self.process_zero

    def process_peak(self):
        """Bytes: peak of the resident set since start(); None if an earlier, higher peak hides it."""
        mark = _high_water()
        if mark is None or not (self._mark_was_reset or mark > self._mark):
            return None
        return max(mark - self.process_zero, 0)

    @contextmanager
    def phase(self, name):
        begin = time.monotonic() - self.zero
        on_phase_begin(name, begin)
        level = self._fold()
        window = [level or 0]
        self._windows.append(window)
        try:
            yield
        finally:
            now = self._fold()
            self._windows = [open_one for open_one in self._windows if open_one is not window]
            sizes = (None,) * 3 if now is None else [size - self.tensors_zero for size in (level, window[0], now)]
            self.phases.append(Phase(name, begin, time.monotonic() - self.zero, *sizes))
            on_phase(self.phases[-1])

    def sample_into(self, send):
        """Call send(seconds, tensor bytes) regularly from a thread: the curve between the exact figures."""

        def loop():
            while True:
                now = self.tensors_now()
                if now is None:
                    return
                try:
                    send(time.monotonic() - self.zero, now)
                except OSError:  # the parent has gone
                    return
                # Often at first, for the curve of a short arm; then seldom, since each sample takes the lock from the arm.
                time.sleep(min(max(SAMPLE_SECONDS, (time.monotonic() - self.zero) / 10), SLOWEST_SAMPLE_SECONDS))

        threading.Thread(target=loop, daemon=True, name="labsupport-sampler").start()


active: Meter | None = None  # the meter of this process, when it runs an arm


def on_phase_begin(name, seconds):  # these three are replaced in the child, which reports to the parent
    pass


def on_phase(phase):
    pass


def on_facts(facts):
    pass


@contextmanager
def phase(name):
    """Name a part of an arm, so that plots shade it and `result.phases` gives its own exact peak.

    Outside an arm it does nothing.
    """
    if active is None:
        yield
    else:
        with active.phase(name):
            yield


def reading():
    """The counters now, in MiB over the arm's start, for use inside an arm (once an epoch, say)."""
    if active is None:
        return Reading(None, None)
    return Reading(in_mib(active.tensors_now()), in_mib(active.process_now()))
