"""`%load_ext labsupport`, then `%%memory` at the top of a cell: what that cell takes, and what stays after it."""

import gc
import html
import threading
import time
from collections import Counter
from types import SimpleNamespace

from labsupport.doctor.alive import MEMORY, alive, by_name, counts_everything, device_of, own_names, running_tensorflow, size
from labsupport.ground.budget import mib
from labsupport.ground.meter import Meter

_PROGRESS_AFTER, _PROGRESS_EVERY = 2, 1  # seconds
_LEAST, _LEAST_UNNAMED = 2**10, 2**16  # bytes worth a word; what TensorFlow and Keras keep for themselves is not


def load_ipython_extension(shell):
    """Called by `%load_ext labsupport`: makes the cell magic `%%memory` known."""
    if shell is None:
        raise RuntimeError("%%memory is for a notebook or IPython: write %load_ext labsupport in a cell there; in a script use labsupport.memory_budget")

    def memory(line, cell):
        """%%memory [label]: run the cell and show what it took."""
        _measured(shell, line.strip() or "this cell", cell)

    shell.register_magic_function(memory, "cell")


def _no_statistics(device):
    raise ValueError("TensorFlow does not run yet")


# What the meter asks until TensorFlow runs: asking TensorFlow itself would start it and fix its devices.
_NOT_RUNNING = SimpleNamespace(
    config=SimpleNamespace(experimental=SimpleNamespace(get_memory_info=_no_statistics)), errors=SimpleNamespace(OpError=ValueError)
)


def _measured(shell, label, cell):
    from IPython.core.error import UsageError

    tf = running_tensorflow()
    before, names, traces = alive(), _held(shell), _traces()
    gauge = Meter(tf or _NOT_RUNNING, device_of(tf) if tf else "CPU:0")
    progress = _Progress(label, gauge)
    gauge.start()
    try:
        result = shell.run_cell(cell, store_history=False)  # shows output and errors as usual
    finally:
        seconds = time.monotonic() - gauge.zero
        progress.end()
    if result.error_before_exec is not None:  # a SyntaxError
        raise UsageError("%%memory: the cell was not run")
    error = result.error_in_exec
    tf = running_tensorflow()
    if tf and gauge.tf is _NOT_RUNNING:  # the cell started it, from nothing
        gauge.tf, gauge.device, gauge.tensors_zero = tf, device_of(tf), 0
    peak, process_peak = gauge.tensors_peak(), gauge.process_peak()
    after = alive()
    stays = {kind: size(after[kind]) - size(before[kind]) for kind in MEMORY}
    tensors = [("tensors: peak over the level before", mib(peak)), ("tensors: more in use after the cell", mib(gauge.tensors_now()))]
    rows = [
        *(tensors if tf else [("tensors", "none, TensorFlow does not run in this kernel")]),
        ("alive after the cell, more than before", ", ".join(f"{kind} {mib(stays[kind])}" for kind in MEMORY)),
        ("held by", _holders(names, _held(shell), sum(stays.values()))),
        ("process: peak over the level before", mib(process_peak)),
        ("time", f"{seconds:.2f} s"),
    ]
    traced = _traces() - traces
    if traced:
        rows.append(("new traces of tf.functions", ", ".join(f"{name} {number}" for name, number in traced.most_common(5))))
    notes = _what_is_counted(tf, gauge.device) if tf else ""
    if error is not None:
        notes += " The error's traceback keeps what the failed functions held, until the next error."
    _show(label, rows, notes.strip())
    if error is not None:  # the cell has failed, and "run all" must stop here; the traceback is not shown twice
        error._render_traceback_ = lambda: [f"{type(error).__name__}: its traceback is above the figures of %%memory"]
        raise error


def _held(shell):
    """What each name of the notebook, of its modules and of its outputs holds."""
    names = {name: value for name, value in shell.user_ns.items() if not name.startswith("_") and name not in shell.user_ns_hidden}
    modules = {name: value for name, value in own_names([]).items() if "." in name}
    return by_name({**names, **modules, "Out": shell.user_ns.get("Out")})


def _holders(before, after, stays):
    """Text: the names that hold more than before, largest first, and what no name holds."""
    more = {name: sum(count[kind] - before.get(name, count.__class__())[kind] for kind in MEMORY) for name, count in after.items()}
    more |= {name: -sum(count[kind] for kind in MEMORY) for name, count in before.items() if name not in after}
    unnamed = stays - sum(more.values())
    rows = sorted(((grown, name) for name, grown in more.items() if grown >= _LEAST), reverse=True)
    parts = [f"{name} {mib(grown)}" for grown, name in rows[:8]] + (["…"] if len(rows) > 8 else [])
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


def _what_is_counted(tf, device):
    counted = counts_everything(tf, device)
    if counted is None:
        return (
            f"TensorFlow's allocator on {device} keeps no statistics in this kernel. With %env TF_CPU_ALLOCATOR_USE_BFC=1 in a cell "
            "before TensorFlow is imported it counts every tensor."
        )
    if counted:
        return f"TensorFlow's allocator on {device} counts every tensor here; NumPy arrays, graphs and Python are in the process's figure alone."
    return (
        f"TensorFlow's allocator on {device} counts only blocks above about 256 KiB here, smaller tensors are missing from peak and in use. "
        "With %env TF_CPU_ALLOCATOR_USE_BFC=1 in a cell before TensorFlow is imported it counts every tensor."
    )


def _show(label, rows, note):
    from IPython.display import display

    width = max(len(name) for name, _ in rows)
    text = "\n".join([f"%%memory: {label}", *(f"  {name:<{width}}  {value}" for name, value in rows), *([note] if note else [])])
    cells = "".join(
        f'<tr><th scope="row" style="text-align:left">{html.escape(name)}</th><td style="text-align:left">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    markup = f'<table><caption style="text-align:left"><b>%%memory: {html.escape(label)}</b></caption>{cells}</table><div><small>{html.escape(note)}</small></div>'
    display({"text/plain": text, "text/html": markup}, raw=True)


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
        return {"text/plain": text, "text/html": html.escape(text)}

    def _run(self):
        wait = _PROGRESS_AFTER
        while not self.over.wait(wait):
            now = self.gauge.tensors_now()
            tensors = "" if now is None else f", tensors {mib(now)} over the level before"
            self.handle.update(self._bundle(f"%%memory: {self.label} runs, {time.monotonic() - self.gauge.zero:.0f} s{tensors}"), raw=True)
            wait = _PROGRESS_EVERY

    def end(self):
        self.over.set()
        self.thread.join(_PROGRESS_EVERY)
        self.handle.update(self._bundle(""), raw=True)
