"""`%load_ext labsupport`, then `%%memory` at the top of a cell: what that cell takes, and what stays after it."""

import gc
import os
import sys
import threading
import time
from collections import Counter

from labsupport.doctor.alive import MEMORY, alive, allocator, counts_everything, running_tensorflow, size
from labsupport.doctor.names import by_name, more, own_names
from labsupport.ground.budget import mib
from labsupport.ground.meter import Meter
from labsupport.peak.here import recorded
from labsupport.peak.parts import largest
from labsupport.showing.cards import template

# Seconds: people wonder about a cell that takes longer than two, and what moves once a second looks alive.
_PROGRESS_AFTER, _PROGRESS_EVERY = 2, 1
# Bytes of a name, and of what no name holds, that are worth a word. What TensorFlow and Keras keep for themselves
# (names of layers, seeds, a counter of steps) is less.
_LEAST, _LEAST_UNNAMED = 2**10, 2**16
_MOST_NAMES, _MOST_TRACES = 8, 5  # told of each: more do not fit the line

# What to do about an allocator that counts less, told once a kernel.
_REMEDY = (
    " Restart the kernel and write %load_ext labsupport before TensorFlow is imported: then it counts every tensor."
)
_advised = set()

_TABLE = template("""\
<table><caption style="text-align:left"><b>%%memory: {{ label }}</b></caption>
{% for name, value in rows %}
<tr><th scope="row" style="text-align:left">{{ name }}</th><td style="text-align:left">{{ value }}</td></tr>
{% endfor %}
</table><div><small>{{ note }}</small></div>""")
_LINE = template("{{ text }}")


def load_ipython_extension(shell):
    """Called by `%load_ext labsupport`: makes the cell magic `%%memory` known."""
    if shell is None:
        raise RuntimeError(
            "%%memory is for a notebook or IPython: write %load_ext labsupport in a cell there; "
            "in a script use labsupport.memory_budget"
        )

    def memory(line, cell):
        """%%memory [label]: run the cell and show what it took."""
        _measured(shell, line.strip() or "this cell", cell)

    # With this allocator every tensor is counted. Where TensorFlow has been loaded, it is too late.
    if "tensorflow" not in sys.modules:
        os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
    shell.register_magic_function(memory, "cell")


def _measured(shell, label, cell):
    tf = running_tensorflow()
    before, names, traces = alive(), _held(shell), _traces()
    gauge = Meter(allocator(tf) if tf else None)  # asking TensorFlow would start it, and fix its devices
    seconds, process_peak, error, seen = _run(shell, label, cell, gauge)
    tf = running_tensorflow()
    if tf and gauge.counter is None:  # the cell started it, from nothing
        gauge.attach(allocator(tf))
    tensors_peak = gauge.tensors_peak()
    after = alive()
    stays = {kind: size(after[kind]) - size(before[kind]) for kind in MEMORY}
    rows = [
        *(_tensor_rows(gauge, tensors_peak) if tf else [("tensors", "none, TensorFlow does not run in this kernel")]),
        *([("at that peak", _at_peak(seen))] if tf else []),
        ("alive after the cell, more than before", ", ".join(f"{kind} {mib(stays[kind])}" for kind in MEMORY)),
        ("held by", _holders(more(names, _held(shell)), sum(stays.values()))),
        ("process: peak over the level before", mib(process_peak)),
        ("time", f"{seconds:.2f} s"),
    ]
    traced = (_traces() - traces).most_common(_MOST_TRACES)
    if traced:
        rows.append(("new traces of tf.functions", ", ".join(f"{name} {number}" for name, number in traced)))
    notes = _what_is_counted(gauge.counter) if tf else ""
    if seen.parts is not None:
        notes += " Every allocation was recorded meanwhile, which is in the time and in the process's figure."
    if error is not None:
        notes += " The error's traceback keeps what the failed functions held, until the next error."
    _show(label, rows, notes.strip())
    if error is not None:  # the cell has failed, and "run all" must stop here; the traceback is not shown twice
        error._render_traceback_ = lambda: [f"{type(error).__name__}: its traceback is above the figures of %%memory"]
        raise error


def _run(shell, label, cell, gauge):
    """Run the cell, which shows output and errors as usual; the gauge starts with it.

    (seconds, bytes that the process added at most, the cell's exception or None, what was Seen of its allocations).
    """
    from IPython.core.error import UsageError

    progress = _Progress(label, gauge)
    gauge.start()
    try:
        with recorded(label) as seen:
            result = shell.run_cell(cell, store_history=False)
            seconds, process_peak = time.monotonic() - gauge.zero, gauge.process_peak()
    finally:
        progress.end()
    if result.error_before_exec is not None:  # a SyntaxError
        raise UsageError("%%memory: the cell was not run")
    return seconds, process_peak, result.error_in_exec, seen


def _at_peak(seen):
    """The largest holders at the peak, by kind and line."""
    return f"unknown: {seen.why}" if seen.parts is None else "; ".join(largest(seen.parts)) or "nothing above 0.05 MiB"


def _tensor_rows(gauge, peak):
    return [
        ("tensors: peak over the level before", mib(peak)),
        ("tensors: more in use after the cell", mib(gauge.tensors_now())),
    ]


def _held(shell):
    """What each name of the notebook, of its modules and of its outputs holds."""
    names = {
        name: value
        for name, value in shell.user_ns.items()
        if not name.startswith("_") and name not in shell.user_ns_hidden
    }
    modules = {name: value for name, value in own_names([]).items() if "." in name}
    return by_name({**names, **modules, "Out": shell.user_ns.get("Out")})


def _holders(rows, stays):
    """Text: the names that hold more than before, largest first, and what no name holds. rows: of more()."""
    unnamed = stays - sum(grown for grown, _, _ in rows)
    held = [f"{name} {mib(grown)}" for grown, _, name in rows if grown >= _LEAST]
    parts = held[:_MOST_NAMES] + (["…"] if len(held) > _MOST_NAMES else [])
    if unnamed >= _LEAST_UNNAMED:
        parts.append(f"no name of the notebook {mib(unnamed)}")
    return ", ".join(parts) or "nothing above 1 KiB"


def _traces():
    """Counter {name of a tf.function: traces so far} of those that are alive."""
    counts = Counter()
    for thing in gc.get_objects():
        if type(thing).__name__ == "Function" and type(thing).__module__.endswith("polymorphic_function"):
            counts[getattr(thing.python_function, "__name__", "tf.function")] += thing.experimental_get_tracing_count()
    return counts


def _what_is_counted(counter):
    counted, where = counts_everything(counter), f"TensorFlow's allocator on {counter.device}"
    remedy = "" if counted or _advised else _REMEDY
    if remedy:
        _advised.add(remedy)
    if counted is None:
        return f"{where} keeps no statistics in this kernel.{remedy}"
    if counted:
        return f"{where} counts every tensor here; NumPy arrays, graphs and Python are in the process's figure alone."
    return (
        f"{where} counts only blocks above about 256 KiB here, "
        f"smaller tensors are missing from peak and in use.{remedy}"
    )


def _show(label, rows, note):
    from IPython.display import display

    width = max(len(name) for name, _ in rows)
    lines = [f"%%memory: {label}", *(f"  {name:<{width}}  {value}" for name, value in rows), *([note] if note else [])]
    markup = _TABLE.render(label=label, rows=rows, note=note)
    display({"text/plain": "\n".join(lines), "text/html": markup}, raw=True)


class _Progress:
    """A line above the cell's output while it runs longer than two seconds."""

    def __init__(self, label, gauge):
        from IPython.display import display

        self.label, self.gauge = label, gauge
        self.handle = display(self._bundle(""), raw=True, display_id=True)  # made here: a thread can only update
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True, name="labsupport-progress")
        self.thread.start()

    @staticmethod
    def _bundle(text):
        return {"text/plain": text, "text/html": _LINE.render(text=text)}

    def _run(self):
        wait = _PROGRESS_AFTER
        while not self.over.wait(wait):
            now = self.gauge.tensors_now()
            tensors = "" if now is None else f", tensors {mib(now)} over the level before"
            self.handle.update(
                self._bundle(f"%%memory: {self.label} runs, {time.monotonic() - self.gauge.zero:.0f} s{tensors}"),
                raw=True,
            )
            wait = _PROGRESS_EVERY

    def end(self):
        self.over.set()
        self.thread.join(_PROGRESS_EVERY)
        self.handle.update(self._bundle(""), raw=True)
