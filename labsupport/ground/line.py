"""A line for the arms of several kernels on one machine: an arm begins when a core and memory for it are free.

Switched on by the environment variable LABSUPPORT_LINE, a folder that the kernels share; tools/classroom sets it. Every arm
has a file in it, which its kernel keeps locked (flock) while the arm waits or runs. The system takes the lock away
when that process ends, however it ends, so nobody waits for a kernel that has died.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path

import psutil

from labsupport.ground.budget import ITSELF, LINE
from labsupport.ground.folders import ArmSetupError

try:
    import fcntl
except ImportError:  # not on Windows, where the labs run in WSL
    fcntl = None

_WAITS, _RUNS = b"w", b"r"  # what an arm's file holds


class Place:
    """One arm's place in the line of a folder; tensors: bytes that it may come to hold; path: its file. Raises OSError."""

    def __init__(self, folder, tensors, cores=None):
        self._folder, self._cores = Path(folder), cores or usable_cores()
        self._needs = ITSELF + tensors
        with self._alone():  # a file that is not locked yet would be taken for a dead kernel's
            descriptor, path = tempfile.mkstemp(prefix=f"{time.time_ns():020}-", dir=self._folder)
            self._own, self.path = descriptor, Path(path)
            os.fchmod(descriptor, 0o644)  # learners on one server have accounts of their own
            os.write(descriptor, _WAITS)
            fcntl.flock(descriptor, fcntl.LOCK_EX)

    def turn(self):
        """0 once the arm may begin, from when on it counts as one that runs; before that its place in the line, from 1."""
        with self._alone():
            others = {path.name: state for path in self._folder.iterdir() if (state := self._state(path))}
            ahead = sum(state == _WAITS and name < self.path.name for name, state in others.items())
            run = sum(state == _RUNS for state in others.values())
            # Whatever is free, one arm may run: what it lacks then is for its budget to say.
            if ahead or (run and (run >= self._cores or psutil.virtual_memory().available < self._needs)):
                return ahead + 1
            os.pwrite(self._own, _RUNS, 0)
            return 0

    def leave(self):
        """Let the next one come."""
        self.path.unlink(missing_ok=True)
        os.close(self._own)

    def _state(self, path):
        """What another's file holds; None for one that nobody holds any more, which is removed where that is allowed, and for the own."""
        if path == self.path:
            return None
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except OSError:  # it has just left
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(descriptor, 1)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def _alone(self):
        """Nobody else looks at the line or moves in it meanwhile."""
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def standing(tensors):
    """A Place in this machine's line, left at the end; None where there is no line. Raises ArmSetupError."""
    folder = os.environ.get(LINE)
    if not folder or fcntl is None:
        yield None
        return
    try:
        place = Place(folder, tensors)
    except OSError as error:
        raise ArmSetupError(
            f"{LINE} names {folder}, where no line can be kept ({error.strerror}): it must be a folder that all may write to"
        ) from error
    try:
        yield place
    finally:
        place.leave()


def usable_cores():
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
