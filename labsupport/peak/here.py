"""Who holds memory in this very process: for a cell, a test, a script that runs already.

    from labsupport.peak.here import recorded

    with recorded("my cell") as seen:
        ...
    if seen.parts is None:
        print("not taken apart:", seen.why)
    else:
        for row in seen.parts.rows[:3]:
            print(row.size, row.kind, row.line, row.tensor)
        print(seen.lines or seen.parts.window)  # what is not known, in words, or ""

`seen` is filled when the block has ended, also by an exception, which passes; the trace is read when it is first asked.
Nothing is raised into the block: what cannot be recorded is `seen.parts is None` and a reason in `seen.why`. `seen.parts`
are the Parts at the block's worst moment (see parts.py): `.rows`, `.by("line")`, `.over_time`, `.end` (what the block has
left), `.growth`, `.level`; `.before` is what was in use already when it began, of which nothing is known, so that `.named`
counts it as not named.

What it costs: some tens of microseconds for each operation and each line of the script's own code, which is nothing beside
a training step and doubles the time of a loop of the smallest operations; to read it, about a second for each 10,000
operations; memory as window.py says. TensorFlow must be loaded before, and so must Keras for its layers to be named; neither
is started for it.
"""

import contextlib
import os
import sys

from labsupport.ground.quiet import without_stderr
from labsupport.peak.looking import taken_apart
from labsupport.peak.parts import parts
from labsupport.peak.recording import Recording

_SILENT = "TensorFlow's allocator in this process records nothing: set TF_CPU_ALLOCATOR_USE_BFC=1 before it is loaded"


class Seen:
    """What a block held. parts: None where that cannot be told, `why` then says why; lines: why no lines are known, or ""."""

    def __init__(self, label):
        self._label, self._recording, self._parts = label, None, None
        self._why, self.lines = "the block has not ended", ""

    @property
    def parts(self):
        self._read()
        return self._parts

    @property
    def why(self):
        self._read()
        return self._why

    def refuse(self, why):
        self._why = why

    def keep(self, recording):
        """Take a Recording that has ended."""
        self._recording = recording
        if not recording.follows:
            self.lines = "no lines: somebody else follows them in this process (a debugger, coverage)"

    def _read(self):
        if self._recording is None:
            return
        recording, self._recording = self._recording, None
        try:
            told = taken_apart(recording, None, ended=True)
            if not told["peak"] and not os.environ.get("TF_CPU_ALLOCATOR_USE_BFC"):
                self._why = _SILENT
            else:
                self._parts, self._why = parts(self._label, told, None), ""
        except Exception as error:
            self._why = f"the recording could not be read: {error}"


@contextlib.contextmanager
def recorded(label="this block"):
    """Record the allocations of a block in this process; gives a Seen, which is filled at its end. See above."""
    seen = Seen(label)
    recording = _begun(seen)
    try:
        yield seen
    except Exception:
        if recording is not None:
            recording.failed = True
        raise
    finally:
        if recording is not None:
            _end(seen, recording)


def _begun(seen):
    """A Recording that runs, or None with the reason in `seen`."""
    tf = sys.modules.get("tensorflow")
    if tf is None:
        seen.refuse("TensorFlow was not loaded when the block began")
        return None
    try:
        with without_stderr():  # a dozen lines of TensorFlow's profiler
            return Recording(tf).__enter__()
    except Exception as error:
        seen.refuse(f"no recording: {error}")
        return None


def _end(seen, recording):
    try:
        with without_stderr():  # a dozen lines of TensorFlow's profiler
            recording.__exit__(None, None, None)
        seen.keep(recording)
    except Exception as error:
        seen.refuse(f"the recording could not be read: {error}")
