"""What an arm came to: its figures with their sources, its curve, and an error a learner can read."""

import linecache
import os
import site
import sys
import sysconfig
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from labsupport.ground.budget import in_mib, mib
from labsupport.ground.record import Cause, Facts

_ROOT = Path(__file__).parents[2]
_PYTHONS_OWN = os.path.join(sysconfig.get_path("stdlib"), "")
SOURCES = {
    "peak": "allocator counter (get_memory_info)",
    "end": "allocator counter (get_memory_info)",
    "process_peak": "high-water mark of the resident set (VmHWM)",
    "process_end": "resident set",
}


class Line(NamedTuple):
    """A line of the learner's own code; place: "Cell In[4]" or a file. function: the name of that in which it stands, where it is known."""

    place: str
    number: int
    source: str
    function: str = ""


class Cell(NamedTuple):
    """A cell of a notebook that the doctor examines: its name, how many of its lines stand above the code, and all lines."""

    name: str
    above: int
    lines: list


CELLS = {}  # {file name of a cell's code: Cell}; empty but where a notebook is examined (doctor/cells.py)


def line_of(file, number, function=""):
    """The Line of a file, or of a notebook cell that ran here."""
    if cell := CELLS.get(file):
        number += cell.above
        return Line(cell.name, number, "".join(cell.lines[number - 1 : number]).strip(), function)
    return Line(place(file), number, linecache.getline(file, number).strip(), function)


def short(place, number):
    """A line in short: "train.py:41", or "cell 3, line 5" in a notebook."""
    return f"{place}, line {number}" if place.startswith("cell ") else f"{place}:{number}"


def place(file):
    """A file as a learner knows it: "Cell In[4]" for a notebook cell, a library's file from its package on, Python's own from its module on, others from the current folder on."""
    try:
        from IPython import get_ipython

        known = get_ipython().compile.format_code_name(file)
    except (ImportError, AttributeError):
        known = None
    if known:
        return " ".join(known)
    file = file.split("-packages/")[-1].removeprefix(_PYTHONS_OWN)
    return file.removeprefix(str(_ROOT) + os.sep).removeprefix(_here())


def _here():
    """The current folder with a slash behind it; "" where it was deleted."""
    try:
        return os.path.join(os.getcwd(), "")
    except OSError:
        return ""


@dataclass
class ArmError:
    """Why an arm did not return. message: one sentence; frames: Lines, outermost first.

    log: what the process wrote to standard error; after an OOM, the allocator's dump.
    """

    cause: Cause
    message: str
    frames: list = field(default_factory=list)
    traceback: str = ""
    log: str = ""

    def __str__(self):
        place = ""
        if self.frames:
            last = self.frames[-1]
            place = f" at {last.place}, line {last.number}: {last.source}"
        return self.message + place

    __repr__ = __str__


class Family(NamedTuple):
    """The children of an arm when they held most: bytes that are theirs alone (USS), of all and of the largest."""

    seconds: float
    number: int
    size: int
    largest: int


class Offspring(NamedTuple):
    """What children that a script forked have made for themselves while it trained: bytes of all and of the largest when they held most.

    late: the share of all that they ever made which they made in the last third of their lives.
    """

    number: int
    size: int
    largest: int
    late: float


@dataclass(repr=False)
class ArmResult:
    """One measured run of one function.

    value: what the function returned (None after an error). error: an ArmError or None.
    figures: bytes over the level at the arm's start, by name (see SOURCES); None means unavailable.
    tensors, process: the sampled curves as [(seconds, bytes)]; they show the way, the figures are exact.
    phases: the finished `with phase(...)` blocks (record.Phase), in order of their end.
    open_phases: (name, start) of blocks that are not left yet, while the arm runs or where it was ended.
    wanted: bytes of the allocation that had no room, where TensorFlow told. operation: the one that asked for them, see
    oom.failed_operation(); "" where nothing tells. dumps: bytes in use whenever its allocator
    ran out, in order; errors that the function caught count, too. regions: bytes of each region that the allocator took,
    where its log tells of them (TF_CPP_VMODULE=bfc_allocator=1). facts: what the doctor's probes saw, without them None.
    family: what its children held, where that was much; offspring: what they made, of a script. status: a script's exit status as Popen gives it, None for an arm.
    outside: bytes that a script and its children might add beside its tensors.
    job: the arm.Job that was run, where it can be run again.
    """

    label: str
    budget: int
    budget_given: bool
    value: object = None
    error: ArmError | None = None
    seconds: float | None = None
    figures: dict = field(default_factory=lambda: dict.fromkeys(SOURCES))
    tensors: list = field(default_factory=list)
    process: list = field(default_factory=list)
    phases: list = field(default_factory=list)
    open_phases: list = field(default_factory=list)
    wanted: int | None = None
    operation: str = ""
    dumps: list = field(default_factory=list)
    regions: list = field(default_factory=list)
    facts: Facts | None = None
    family: Family | None = None
    offspring: Offspring | None = None
    status: int | None = None
    outside: int | None = None
    device: str = ""
    output: str = ""
    job: object = field(default=None, compare=False)

    @property
    def ok(self):
        return self.error is None

    @property
    def in_use(self):
        """Bytes in use at the worst moment: when memory ran out, where a dump tells; otherwise the peak."""
        return self.dumps[-1] if not self.ok and self.dumps else self.figures["peak"]

    @property
    def peak_mib(self):
        """Most tensor memory in use at any moment, MiB (exact)."""
        return in_mib(self.figures["peak"])

    @property
    def reserved_mib(self):
        """All regions that the allocator took from the device, MiB; None where its log does not tell of them."""
        return in_mib(sum(self.regions)) if self.regions else None

    @property
    def end_mib(self):
        """Tensor memory still in use when the function returned, MiB (exact)."""
        return in_mib(self.figures["end"])

    @property
    def process_peak_mib(self):
        """Most resident memory added at any moment, MiB: what `top` would have shown."""
        return in_mib(self.figures["process_peak"])

    @property
    def wanted_mib(self):
        """The allocation that found no room, MiB; None where none is known."""
        return in_mib(self.wanted)

    @property
    def process_end_mib(self):
        """Resident memory added and still there when the function returned, MiB."""
        return in_mib(self.figures["process_end"])

    @property
    def outcome(self):
        """One word or two for tables: "finished", "OOM", "MemoryError", or the cause's own words."""
        names = {Cause.OOM: "OOM", Cause.MEMORY: "MemoryError"}
        return "finished" if self.ok else names.get(self.error.cause, str(self.error.cause))

    def __str__(self):
        time = "" if self.seconds is None else f" after {self.seconds:.1f} s"
        budget = f" of a budget of {mib(self.budget)}" if self.budget_given else ""
        tail = "" if self.ok else f"; {self.error}"
        return (
            f"{self.label}: {self.outcome}{time}. Tensors: peak {mib(self.figures['peak'])}{budget}, "
            f"at the end {mib(self.figures['end'])}. Process: peak {mib(self.figures['process_peak'])}{tail}"
        )

    __repr__ = __str__

    def phase(self, name):
        """The finished phase of this name; of several the last. Raises KeyError with the names that there are."""
        found = [phase for phase in self.phases if phase.name == name]
        if not found:
            there = ", ".join(dict.fromkeys(phase.name for phase in self.phases)) or "none"
            raise KeyError(f"no phase {name!r}; there are {there}")
        return found[-1]


@cache
def libraries():
    """Folders whose code is nobody's own: Python, installed packages, labsupport itself."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), os.path.dirname(os.path.dirname(__file__))]
    # Further ones come in by PYTHONPATH, as on many clusters.
    folders += [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    return tuple({os.path.join(form(folder), "") for folder in folders for form in (os.path.abspath, os.path.realpath)})


def is_own(file):
    """Whether code of this file is the learner's rather than a library's. A relative path or a cell's name is the learner's."""
    return not file.startswith(("<frozen", *libraries())) and not file.endswith(".pyx")  # Cython tells a relative path


class Stopped(KeyboardInterrupt):
    """A run was stopped or interrupted by who started it: a notebook shows the sentence, and goes no further."""

    def _render_traceback_(self):  # what IPython shows in place of a traceback
        return [str(self)]


def _refuse_stopped(result):
    if not result.ok and result.error.cause is Cause.STOPPED:
        raise Stopped(f'"{result.label}" has no figures: {result.error.message}')


def expect_finished(*results):
    """Check that arms ran to their end: a RuntimeError with the first one's error otherwise, Stopped for one that was."""
    for result in results:
        _refuse_stopped(result)
        if not result.ok:
            raise RuntimeError(f'the arm "{result.label}" did not finish: {result.error}')


def expect_oom(result):
    """Check that an arm really died of an out-of-memory error; an AssertionError otherwise, Stopped if it was stopped.

    A lab about a failure must not pass when nothing failed.
    """
    _refuse_stopped(result)
    if result.error is None:
        raise AssertionError(
            f'"{result.label}" was expected to run out of memory, but it finished with a peak of '
            f"{mib(result.figures['peak'])}; the budget of {mib(result.budget)} is too large or the failure is gone"
        )
    if not result.error.cause.of_memory:
        raise AssertionError(f'"{result.label}" was expected to run out of memory, but: {result.error}')
