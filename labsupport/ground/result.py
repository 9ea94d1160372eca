"""What an arm came to: its figures with their sources, its curve, and an error a learner can read."""

import html
import math
import os
import re
from dataclasses import dataclass, field

from labsupport.ground.budget import in_mib, mib, parse_size

SOURCES = {
    "peak": "allocator counter (get_memory_info)",
    "end": "allocator counter (get_memory_info)",
    "process_peak": "high-water mark of the resident set (VmHWM)",
    "process_end": "resident set",
}
_DTYPE_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "int64": 8, "uint64": 8, "int32": 4, "uint32": 4,
    "int16": 2, "uint16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(repr=False)
class ArmError:
    """Why an arm did not return. kind: oom, memory, exception, killed, timeout, stopped or unpicklable.

    frames: (place, line number, source line) of the learner's own code, outermost first.
    log: what the process wrote to standard error; after an OOM, the allocator's dump.
    """

    kind: str
    message: str
    frames: list = field(default_factory=list)
    traceback: str = ""
    log: str = ""

    def __str__(self):
        place = f" at {self.frames[-1][0]}, line {self.frames[-1][1]}: {self.frames[-1][2]}" if self.frames else ""
        return self.message + place

    __repr__ = __str__

    def _repr_html_(self):
        rows = "".join(f"<br><code>{html.escape(f'{p}, line {n}: {text}')}</code>" for p, n, text in self.frames)
        folds = "".join(
            f"<details><summary>{title}</summary><pre>{html.escape(text)}</pre></details>"
            for title, text in (("Whole traceback", self.traceback), ("Log of the process, with the allocator's dump", self.log))
            if text
        )
        return f"<div><b>{html.escape(self.message)}</b>{rows}{folds}</div>"


@dataclass(repr=False)
class ArmResult:
    """One measured run of one function.

    value: what the function returned (None after an error). error: an ArmError or None.
    figures: bytes over the level at the arm's start, by name (see SOURCES); None means unavailable.
    tensors, process: the sampled curves as [(seconds, bytes)]; they show the way, the figures are exact.
    phases: the finished `with phase(...)` blocks, in order of their end, each with peak and held bytes.
    open_phases: (name, start) of blocks that are not left yet, while the arm runs or where it was ended.
    facts: what the doctor's probes saw (probes.Probe.facts); empty without them.
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
    facts: dict = field(default_factory=dict)
    device: str = ""
    output: str = ""

    @property
    def ok(self):
        return self.error is None

    @property
    def peak_mib(self):
        """Most tensor memory in use at any moment, MiB (exact)."""
        return in_mib(self.figures["peak"])

    @property
    def end_mib(self):
        """Tensor memory still in use when the function returned, MiB (exact)."""
        return in_mib(self.figures["end"])

    @property
    def process_peak_mib(self):
        """Most resident memory added at any moment, MiB: what `top` would have shown."""
        return in_mib(self.figures["process_peak"])

    @property
    def process_end_mib(self):
        """Resident memory added and still there when the function returned, MiB."""
        return in_mib(self.figures["process_end"])

    @property
    def outcome(self):
        """One word or two for tables: "finished", "OOM", "killed" and so on."""
        names = {"oom": "OOM", "memory": "MemoryError", "exception": "error", "unpicklable": "no value"}
        return "finished" if self.ok else names.get(self.error.kind, self.error.kind)

    def __str__(self):
        time = "" if self.seconds is None else f" after {self.seconds:.1f} s"
        budget = f" of a budget of {mib(self.budget)}" if self.budget_given else ""
        tail = "" if self.ok else f"; {self.error}"
        return (
            f"{self.label}: {self.outcome}{time}. Tensors: peak {mib(self.figures['peak'])}{budget}, "
            f"at the end {mib(self.figures['end'])}. Process: peak +{mib(self.figures['process_peak'])}{tail}"
        )

    __repr__ = __str__

    def phase(self, name):
        """The finished phase of this name; of several the last. Raises KeyError with the names that there are."""
        found = [phase for phase in self.phases if phase.name == name]
        if not found:
            raise KeyError(f"no phase {name!r}; there are {', '.join(dict.fromkeys(phase.name for phase in self.phases)) or 'none'}")
        return found[-1]


_WANTED = re.compile(r"OOM when allocating tensor with shape\s?\[([\d,]*)\] and type (\w+)")


def is_own(file):
    """Whether code of this file is the learner's rather than a library's."""
    return not any(part in file for part in ("-packages", "<frozen", os.path.dirname(__file__), os.path.dirname(os.__file__)))


def wanted_bytes(message):
    """Bytes of the allocation that TensorFlow's message says had no room; None if it does not tell."""
    if found := _WANTED.search(message):
        return math.prod(int(n) for n in found[1].split(",") if n) * _DTYPE_BYTES[found[2]] if found[2] in _DTYPE_BYTES else None
    by_xla = re.findall(r"while trying to allocate ([\d.]+\s?[KMG]?i?B)", message)
    return parse_size(by_xla[-1]) if by_xla else None


def dumped_in_use(log):
    """Bytes in use by each of the allocator's dumps in a log, in their order.

    Only a dump tells what was in use: a graph has let go of its tensors when its error arrives in Python.
    """
    return [parse_size(size) for size in re.findall(r"Sum Total of in-use chunks: ([\d.]+[KMG]?i?B)", log)]


def explain_oom(message, log, budget):
    """One readable sentence from TensorFlow's message and the allocator's dump: which tensor, its bytes, what was in use."""
    found = _WANTED.search(message)
    op = re.search(r"\{\{node ([^}]+)\}\}", message) or re.search(r"\[Op:(\w+)\]", message)
    where = f" in {op[1]}" if op else ""
    if not found:  # XLA words it differently: "Out of memory while trying to allocate …"
        lines = message.strip().splitlines() or ["no message"]
        return f"Out of memory{where}: " + next((line.strip() for line in lines if "ut of memory" in line), lines[0])
    in_use = dumped_in_use(log)[-1:]
    return (
        f"Out of memory{where}: no room for a tensor of shape [{found[1].replace(',', ', ')}], {found[2]} = {mib(wanted_bytes(message))}, "
        f"with {mib(in_use[0] if in_use else None)} in use of a budget of {mib(budget)}"
    )


def expect_finished(*results):
    """Check that arms ran to their end: a RuntimeError with the first one's error otherwise."""
    for result in results:
        if not result.ok:
            raise RuntimeError(f"the arm \"{result.label}\" did not finish: {result.error}")


def expect_oom(result):
    """Check that an arm really died of an out-of-memory error; an AssertionError otherwise.

    A lab about a failure must not pass when nothing failed.
    """
    if result.error is None:
        raise AssertionError(
            f"\"{result.label}\" was expected to run out of memory, but it finished with a peak of "
            f"{mib(result.figures['peak'])}; the budget of {mib(result.budget)} is too large or the failure is gone"
        )
    if result.error.kind not in ("oom", "memory"):
        raise AssertionError(f"\"{result.label}\" was expected to run out of memory, but: {result.error}")
