"""Counters and samples. Peaks come from counters, curves from samples; what cannot be read is None.

Two counters tell two stories. "tensors" is what TensorFlow's allocator has handed out. "process" is the
resident set, which also holds Python, NumPy and graphs, and keeps freed tensor memory in the pool.
"""

import contextlib
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from labsupport.ground.budget import in_mib, process_status
from labsupport.ground.record import Phase, PhaseBegun, Sample, sendable

SAMPLE_SECONDS = 0.04  # 25 a second: the eye sees a curve, and taking one costs a tenth of a millisecond
# A sample takes the GIL from the arm. `make bench` (50,000 eager operations) felt 25 a second and not 7.
SLOWEST_SAMPLE_SECONDS = 0.15


@dataclass
class Reading:
    """Memory at one moment, in MiB over the level at the arm's start; None where it cannot be read.

    private_mib, mapped_mib: the two parts of process_mib (Linux). Private pages are this process's alone, its tensors
    among them. Mapped ones belong to files, code included: the system may drop them and read them again.
    """

    tensors_mib: float | None = None
    process_mib: float | None = None
    private_mib: float | None = None
    mapped_mib: float | None = None


class AllocatorCounter:
    """The statistics of TensorFlow's allocator on one device, in bytes (tf.config.experimental.get_memory_info)."""

    def __init__(self, tf, device):
        self.tf, self.device = tf, device

    def read(self):
        """(in use now, peak since the last reset); None where this allocator keeps no statistics."""
        try:
            stats = self.tf.config.experimental.get_memory_info(self.device)
        except (ValueError, self.tf.errors.OpError):
            return None
        return stats["current"], stats["peak"]

    def reset_peak(self):
        self.tf.config.experimental.reset_memory_stats(self.device)


def _high_water():
    """Bytes: the largest resident set of this process so far (VmHWM; getrusage where there is no /proc)."""
    mark = process_status("VmHWM")
    if mark is None:
        with contextlib.suppress(ImportError):  # no such module on Windows
            import resource

            unit = 1 if sys.platform == "darwin" else 1024
            mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return mark


def _resident():
    """(private, mapped): bytes of the resident set; None where there is no /proc. Files in memory (tmpfs) are mapped, too."""
    private, *mapped = (process_status(name) for name in ("RssAnon", "RssFile", "RssShmem"))
    return private, None if None in mapped else sum(mapped)


@dataclass
class Meter:
    """The exact counters of the process it lives in, over the level when it was started.

    counter: an AllocatorCounter, or None as long as TensorFlow does not run; tensors are unavailable then.
    """

    counter: AllocatorCounter | None = None
    zero: float = 0.0
    tensors_zero: int | None = None
    process_zero: int = 0
    resident_zero: tuple = (None, None)
    phases: list = field(default_factory=list)
    # The allocator has one peak, which phases and laps reset: each window keeps the highest peak since it was opened.
    _windows: list = field(default_factory=lambda: [[0], [0]])  # of the whole arm, of the lap
    _mark: int | None = None
    _mark_was_reset: bool = False

    def start(self):
        """Set the zero level. Peaks count from here."""
        with contextlib.suppress(
            OSError
        ):  # "5" resets VmHWM (Linux, man proc_pid_clear_refs); refused in some containers
            Path("/proc/self/clear_refs").write_text("5")
            self._mark_was_reset = True
        self._mark = _high_water()
        self.process_zero, self.resident_zero = psutil.Process().memory_info().rss, _resident()
        self._start_counter()
        self.zero = time.monotonic()

    def start_late(self, zero, process_zero):
        """Set a zero level that was before, in a process of which nothing may be reset: its marks count from its begin."""
        self._mark, self.zero, self.process_zero = 0, zero, process_zero
        self._start_counter()

    def _start_counter(self):
        if stats := self.counter and self.counter.read():
            self.counter.reset_peak()
            self.tensors_zero = stats[0]
            self._windows = [[stats[0]], [stats[0]]]

    def attach(self, counter):
        """Take on a counter that has come to be since start(), with everything that it has counted."""
        self.counter, self.tensors_zero = counter, 0

    def _read(self):
        return None if self.counter is None or self.tensors_zero is None else self.counter.read()

    def tensors_now(self):
        """Bytes the allocator has handed out now, over the zero level."""
        stats = self._read()
        return None if stats is None else stats[0] - self.tensors_zero

    def tensors_peak(self):
        """Bytes: the allocator's peak since start()."""
        return None if self._fold() is None else self._windows[0][0] - self.tensors_zero

    def _fold(self):
        """Let every open window have the peak so far, then start the allocator's own peak anew; bytes in use, or None."""
        stats = self._read()
        if stats is None:
            return None
        for window in self._windows:
            window[0] = max(window[0], stats[1])
        self.counter.reset_peak()
        return stats[0]

    def lap(self):
        """(bytes in use now, peak in bytes since the last lap), over the zero level; (None, None) if unavailable."""
        now = self._fold()
        if now is None:
            return None, None
        peak, self._windows[1][0] = self._windows[1][0], now
        return now - self.tensors_zero, peak - self.tensors_zero

    def lap_peak(self):
        """Bytes: the peak since the last lap so far, over the zero level; None if unavailable."""
        stats = self._read()
        return None if stats is None else max(self._windows[1][0], stats[1]) - self.tensors_zero

    def process_now(self):
        """Bytes of the resident set over the zero level; None before start()."""
        return psutil.Process().memory_info().rss - self.process_zero if self.zero else None

    def resident_now(self):
        """(private, mapped): bytes of the resident set over the zero level; None where it is not told, or before start()."""
        return tuple(None if None in pair else pair[0] - pair[1] for pair in zip(_resident(), self.resident_zero))

    def process_peak(self):
        """Bytes: peak of the resident set since start(); None before it, or if an earlier, higher peak hides it."""
        mark = _high_water()
        if mark is None or self._mark is None or not (self._mark_was_reset or mark > self._mark):
            return None
        return max(mark - self.process_zero, 0)

    def figures(self):
        """{name: bytes or None}: peak and end of both stories, see result.SOURCES."""
        return {
            "peak": self.tensors_peak(),
            "end": self.tensors_now(),
            "process_peak": self.process_peak(),
            "process_end": self.process_now(),
        }

    @contextmanager
    def phase(self, name):
        begin = time.monotonic() - self.zero
        report(PhaseBegun(name, begin))
        level = self._fold()
        window = [level or 0]
        self._windows.append(window)
        try:
            yield
        finally:
            now = self._fold()
            self._windows = [open_one for open_one in self._windows if open_one is not window]
            counted = level is not None and now is not None
            sizes = [size - self.tensors_zero for size in (level, window[0], now)] if counted else [None] * 3
            self.phases.append(Phase(name, begin, time.monotonic() - self.zero, *sizes))
            report(self.phases[-1])

    def sample(self):
        """Report a Sample regularly from a thread: the curve between the exact figures."""
        threading.Thread(target=self.keep_sampling, daemon=True, name="labsupport-sampler").start()

    def keep_sampling(self, also=lambda: None):
        """Report a Sample regularly, as long as there is a counter and somebody who hears it; also() is called each time."""
        while (now := self.tensors_now()) is not None:
            try:
                report(Sample(time.monotonic() - self.zero, now))
            except OSError:  # the watcher has gone
                return
            also()
            # Often at first, for the curve of a short arm; then seldom.
            time.sleep(min(max(SAMPLE_SECONDS, (time.monotonic() - self.zero) / 10), SLOWEST_SAMPLE_SECONDS))


active: Meter | None = None  # the meter of this process, when it runs an arm
_sends = []  # where records go: one function in an arm's process, none elsewhere


def connect(send):
    """Let report() hand its records to send(record)."""
    _sends[:] = [send]


def report(record):
    """Send a record to whoever watches this arm; outside an arm it goes nowhere."""
    for send in _sends:
        send(record)


@contextmanager
def phase(name):
    """Name a part of an arm, so that plots shade it and `result.phases` gives its own exact peak.

    Outside an arm it does nothing.
    """
    if active is None:
        yield
    else:
        with active.phase(sendable(name)):
            yield


def grown(level):
    """What level() tells once it has stopped growing, as when a pipeline's buffers are full, however slow the machine; 5 s at most."""
    last, until = level(), time.monotonic() + 5
    while time.monotonic() < until:
        time.sleep(0.3)
        now = level()
        if now <= last:
            break
        last = now
    return last


def reading():
    """The counters now, in MiB over the arm's start, for use inside an arm (once an epoch, say)."""
    if active is None:
        return Reading()
    return Reading(*map(in_mib, (active.tensors_now(), active.process_now(), *active.resident_now())))
