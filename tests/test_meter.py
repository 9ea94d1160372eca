"""Where a counter cannot be read, the figure is None. Known bytes are measured in test_arm.py."""

import resource
import sys

import numpy as np
import psutil
import pytest

from labsupport import phase, reading
from labsupport.ground import meter
from labsupport.ground.budget import MIB


class NoStatistics:
    """A counter of an allocator that keeps no statistics."""

    def read(self):
        return None


def refused(*_, **__):
    raise FileNotFoundError("no /proc here")


@pytest.fixture
def no_proc(monkeypatch):
    monkeypatch.setattr(meter.Path, "read_text", refused)
    monkeypatch.setattr(meter.Path, "write_text", refused)


def test_without_proc_a_peak_hidden_by_an_earlier_one_is_unavailable(no_proc):
    assert meter.process_status("VmHWM") is None
    b"x" * 200_000_000  # the mark that getrusage keeps for the life of the process
    gauge = meter.Meter(NoStatistics())
    gauge.start()
    assert gauge.process_peak() is None
    mark = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # other tests may have left it higher
    size = mark - psutil.Process().memory_info().rss + 300_000_000
    b"x" * size
    assert gauge.process_peak() == pytest.approx(size, rel=0.1)


def test_without_any_high_water_mark_the_peak_is_unavailable(no_proc, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "resource", None)  # as on Windows
    gauge = meter.Meter(NoStatistics())
    gauge.start()
    assert gauge.process_peak() is None


def test_without_statistics_tensors_are_unavailable_in_phases_too():
    seen = []
    meter.connect(seen.append)
    gauge = meter.Meter(NoStatistics())
    gauge.start()
    with gauge.phase("one"):
        pass
    assert (gauge.tensors_now(), gauge.tensors_peak()) == (None, None)
    phase = seen[-1]
    assert (phase.name, phase.peak_mib, phase.held_mib, phase.rise_mib, phase.added_mib) == (
        "one",
        None,
        None,
        None,
        None,
    )
    meter.connect(lambda record: None)


def test_outside_an_arm_a_phase_does_nothing_and_a_reading_is_unavailable():
    with phase("one"):
        now = reading()
    assert now == meter.Reading(None, None, None, None)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells them apart")
def test_pages_of_a_file_are_told_from_private_ones(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((64, 2**18), np.float32))
    gauge = meter.Meter()
    gauge.start()
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert mapped.sum() > 0
    private, of_files = gauge.resident_now()
    assert private < 8 * MIB and of_files == pytest.approx(64 * MIB, abs=8 * MIB)
    copy = np.array(mapped)
    assert gauge.resident_now()[0] == pytest.approx(private + copy.nbytes, abs=8 * MIB)


def test_where_there_is_no_proc_the_two_are_unavailable(no_proc):
    gauge = meter.Meter()
    gauge.start()
    assert gauge.resident_now() == (None, None)


def test_without_tensorflow_the_process_is_measured_alone():
    gauge = meter.Meter()
    gauge.start()
    with gauge.phase("one"):
        pass
    assert gauge.figures()["peak"] is None and gauge.lap() == (None, None)
    assert gauge.figures()["process_end"] is not None


def test_before_its_start_a_meter_has_no_figures():
    assert set(meter.Meter().figures().values()) == {None}
