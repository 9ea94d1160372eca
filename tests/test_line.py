"""The line of a machine's arms: one after another where there are no more cores, and nobody waits for a dead kernel."""

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple

import psutil
import pytest

from labsupport.ground import line
from labsupport.ground.arm import Job, watched
from labsupport.ground.budget import LINE, MIB
from labsupport.ground.record import Cause, Watcher
from labsupport.showing.live import in_line

# Another kernel: takes a place, says what its turn is, and keeps it until it is killed.
KERNEL = "import sys, time; from labsupport.ground.line import Place; p = Place(sys.argv[1], 0, cores=1); print(p.turn(), flush=True); time.sleep(60)"


@pytest.fixture
def kernel(tmp_path):
    """kernel() starts one and gives its process, which has taken its place."""
    started = []

    def start():
        command = [sys.executable, "-c", KERNEL, str(tmp_path)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        started[-1].turn = int(started[-1].stdout.readline())
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_first_come_first_served(tmp_path):
    one, two, three = (line.Place(tmp_path, 0, cores=1) for _ in range(3))
    assert [place.turn() for place in (three, two, one)] == [3, 2, 0]
    one.leave()
    assert [place.turn() for place in (three, two)] == [2, 0]
    two.leave()
    assert three.turn() == 0
    three.leave()
    assert not list(tmp_path.iterdir())


def test_as_many_run_as_there_are_cores(tmp_path):
    places = [line.Place(tmp_path, 0, cores=2) for _ in range(3)]
    assert [place.turn() for place in places] == [0, 0, 1]
    for place in places:
        place.leave()


def test_an_arm_waits_for_memory_unless_it_is_alone(tmp_path, monkeypatch):
    free = namedtuple("free", "available")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free(1000 * MIB))
    small, large = line.Place(tmp_path, 100 * MIB, cores=8), line.Place(tmp_path, 600 * MIB, cores=8)
    assert (small.turn(), large.turn()) == (0, 1)
    small.leave()
    assert large.turn() == 0
    large.leave()


def test_a_killed_kernel_makes_room(tmp_path, kernel):
    runs, waits = kernel(), kernel()
    assert (runs.turn, waits.turn) == (0, 1)
    own = line.Place(tmp_path, 0, cores=1)
    assert own.turn() == 2
    waits.send_signal(signal.SIGKILL)
    waits.wait()
    assert own.turn() == 1
    runs.send_signal(signal.SIGKILL)
    runs.wait()
    assert own.turn() == 0
    assert [path.name for path in tmp_path.iterdir()] == [own.path.name]
    own.leave()


class Impatient(Watcher):
    """Stops a run after it has been told its place three times."""

    def __init__(self):
        self.places, self.finished = [], None

    @property
    def stopped(self):
        return len(self.places) >= 3

    def wait(self, label, place):
        self.places.append(place)

    def finish(self, result):
        self.finished = result


def test_a_run_that_waits_can_be_stopped_and_leaves_the_line(tmp_path, kernel, monkeypatch):
    monkeypatch.setattr(line, "usable_cores", lambda: 1)
    monkeypatch.setenv(LINE, str(tmp_path))
    kernel()
    watcher = Impatient()
    result = watched(Job(time.sleep, (0,)), lambda: watcher)
    assert result.error.cause is Cause.STOPPED and result is watcher.finished
    assert watcher.places == [1, 1, 1] and len(list(tmp_path.iterdir())) == 1


def environment_of_an_arm():
    return os.environ.get(LINE)


def test_an_arm_runs_when_its_turn_has_come_and_is_itself_in_no_line(tmp_path, kernel, monkeypatch):
    monkeypatch.setattr(line, "usable_cores", lambda: 1)
    monkeypatch.setenv(LINE, str(tmp_path))
    other, places = kernel(), []

    class Patient(Watcher):
        def wait(self, label, place):
            places.append(place)
            other.kill()

    result = watched(Job(environment_of_an_arm), Patient)
    assert result.ok and result.value is None
    assert places[0] == 1 and not list(tmp_path.iterdir())


def test_a_line_in_no_folder_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv(LINE, str(tmp_path / "none"))
    with pytest.raises(line.ArmSetupError, match="LABSUPPORT_LINE"):
        with line.standing(0):
            pass


def test_places_are_said_in_words():
    said = [in_line(place).split(": ")[1].split()[0] for place in (1, 2, 3, 4, 11, 12, 13, 21, 102, 112)]
    assert said == "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 112th".split()
