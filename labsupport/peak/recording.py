"""In a process: the runtime's own trace of every allocation, with marks that say which line, layer and pass it was for.

TensorFlow's profiler records each allocation with its operation, shape and address, and whatever is marked with a TraceMe,
thread by thread and in order. So lines of the script, calls of layers, tapes and updates go into the same trace as marks.
"""

import contextlib
import itertools
import sys
import tempfile
import threading
import time
import weakref
from functools import cache
from pathlib import Path
from typing import NamedTuple

from labsupport.ground import meter
from labsupport.ground.result import is_own
from labsupport.peak.window import Window

_AUTOGRAPH = "__autograph_generated"
_POLL_SECONDS = 0.02  # between two looks at where variables lie; each costs microseconds a variable
_MOST_POLLS = 500  # each is a mark and a dictionary; what is made later is seen when it is made

_NOWHERE = ("", 0)  # the line of a thread that runs nothing of the script

_belongs = cache(is_own)
_running = []  # the Recording of this process: the profiler has one session


@cache
def _own(file):
    return is_own(file) and _AUTOGRAPH not in file


class Seen(NamedTuple):
    """A variable: maker is "optimizer", "Keras" or "script"; line: number of the line that made it; key: its own."""

    name: str
    maker: str
    trainable: bool
    shape: tuple | None
    line: int | None
    key: int = 0


class Recording:
    """A context in which allocations are recorded; what it saw is in the attributes after its end.

    space: the serialized XSpace; lines: [(file, line)] by the number of their marks; polls: [{address: Seen}] of variables by
    the number of their marks; graph: {name of a graph's operation: (number of its line or None, its layer)}; optimizers:
    names of those that updated something; learnt: names of variables that a gradient was asked for; cut: names of the ways
    back that an error ended; phases: names by the number of their marks.
    failed: whoever runs a function in it notes here whether that ended in an error.
    window: what was recorded, where that is not all: a recording ends before its context does when its trace grows too
    large (window.py), and when the script starts the profiler itself. follows: whether lines are marked, which they are
    not where somebody else has set a trace function, a debugger for instance.

    Raises RuntimeError when another Recording runs, TensorFlow's errors when another session of its profiler does. Restored
    at the end: methods, trace functions; nothing is left in the temporary folder.
    """

    def __init__(self, tf, full=None):
        """full(): called from another thread when the recording has ended early for its size."""
        self._tf, self._when_full = tf, full
        self.window, self.follows, self._lock, self._folder = "", True, threading.Lock(), None
        self.space, self.lines, self.polls, self.graph = b"", [], [], {}
        self.optimizers, self.learnt, self.cut, self.phases, self.failed = set(), set(), set(), [], False
        self._numbers, self._variables, self._making, self._layers = {}, {}, [], threading.local()
        self._ways_back, self._tapes, self._keys = itertools.count(), itertools.count(), itertools.count()
        self._written = {}  # where an operation is created: number of the script's line
        self._polled, self._undo = 0.0, contextlib.ExitStack()

    def __enter__(self):
        if _running:
            raise RuntimeError("another recording of this process is running")
        options = self._tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=0
        )
        with contextlib.ExitStack() as undo:  # undone at once where one of these fails
            folder = undo.enter_context(tempfile.TemporaryDirectory())
            self._tf.profiler.experimental.start(folder, options)
            _running.append(self)
            undo.callback(_running.clear)
            self._folder = folder
            undo.callback(self._stop)
            self._undo = undo
            self._mark_calls()
            self._follow()
            undo.callback(Window(self._full).close)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error):
        self._mark("end 0")
        self._undo.close()

    def _stop(self, window=""):
        """End the recording; the marks go on until the end of the context and go nowhere."""
        with self._lock:
            if self._folder is not None:
                folder, self._folder, self.window = self._folder, None, window
                self._tf.profiler.experimental.stop()
                self.space = next(Path(folder).rglob("*.xplane.pb")).read_bytes()

    def _full(self, window):
        self._stop(window)
        if self._when_full is not None:
            self._when_full()

    def _follow(self):
        """Mark the lines of the script that run from now on: also of functions that run already, in a `with` block."""
        self.follows = sys.gettrace() is None
        if not self.follows:
            return
        self._undo.callback(threading.settrace, threading.gettrace())
        threading.settrace(self._called)
        frame = _caller(sys._getframe())
        if frame is not None:
            self._mark(f"line {self._number((frame.f_code.co_filename, frame.f_lineno))}")
        while frame is not None:
            self._undo.callback(setattr, frame, "f_trace", frame.f_trace)
            frame.f_trace = self._line
            frame = _caller(frame)
        sys.settrace(self._called)
        self._undo.callback(self._let_go)

    def _let_go(self):
        if sys.gettrace() == self._called:  # a debugger that was started inside stays
            sys.settrace(None)

    # --- marks

    def _mark(self, name):
        with self._tf.profiler.experimental.Trace(name):
            pass

    def _number(self, place):
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self.lines)
            self.lines.append(place)
        return number

    def _called(self, frame, event, arg):
        """The trace function of Python: for the script's own code alone it follows the lines."""
        if self._folder is None:
            self._let_go()
        return self._line if self._folder is not None and _own(frame.f_code.co_filename) else None

    def _line(self, frame, event, arg):
        if self._folder is None:
            self._let_go()
            return None
        if event == "return":  # what follows belongs again to the line that called
            self._poll(least=0 if _caller(frame) is None else _POLL_SECONDS)
            frame = _caller(frame)
        if frame is not None and event in ("line", "return"):
            kind = "line" if event == "line" else "back"
            self._mark(f"{kind} {self._number((frame.f_code.co_filename, frame.f_lineno))}")
            self._poll()
        return self._line

    def _poll(self, least=_POLL_SECONDS):
        """Note where in memory each variable lies now."""
        now = time.monotonic()
        if now - self._polled < least or len(self.polls) >= _MOST_POLLS or not self._tf.executing_eagerly():
            return
        self._polled = now
        self._see(*self._variables.values())

    def _see(self, *variables):
        found = {}
        for reference, maker, line, key in variables:
            if (variable := reference()) is not None and (address := _address(variable)) is not None:
                shape = None if variable.shape.rank is None else tuple(variable.shape.as_list())
                found[address] = Seen(variable.name.removesuffix(":0"), maker, variable.trainable, shape, line, key)
        if found:
            self._mark(f"poll {len(self.polls)}")
            self.polls.append(found)

    # --- what is marked beside lines

    def _mark_calls(self):
        from tensorflow.python.framework import func_graph
        from tensorflow.python.ops import script_ops
        from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable
        from tensorflow.python.profiler import profiler_v2

        self._replace(self._tf.GradientTape, "gradient", self._way_back)
        self._replace(self._tf.GradientTape, "jacobian", self._way_back)
        self._replace(self._tf.GradientTape, "__enter__", self._tape_entered)
        self._replace(self._tf.GradientTape, "__exit__", self._tape_left)
        self._replace(BaseResourceVariable, "__init__", self._initialised)
        self._replace(func_graph.FuncGraph, "_create_op_internal", self._operation_made)
        self._replace(func_graph, "func_graph_from_py_func", self._graph_made)
        self._replace(meter.Meter, "phase", self._phase)
        self._replace(script_ops.FuncRegistry, "__call__", self._called_by_graph)
        for module in (profiler_v2, self._tf.profiler.experimental):
            self._replace(module, "start", self._give_way)
        if "keras" in sys.modules:  # not loaded for a script that does without
            self._mark_keras(sys.modules["keras"])

    def _mark_keras(self, keras):
        optimizer = keras.optimizers.Optimizer
        self._replace(keras.layers.Layer, "__call__", self._layer_called)
        self._replace(optimizer, "apply", self._updated)
        for name in {"add_variable", "add_variable_from_reference", "add_optimizer_variables"} & {*dir(optimizer)}:
            self._replace(optimizer, name, self._maker("optimizer"))  # the third not in Keras 3.1
        self._replace(keras.Variable, "__init__", self._maker("Keras"))

    def _give_way(self, original, *args, **named):
        """The script starts the profiler: of two sessions the second would fail."""
        self._stop("what came before the script's own recording by TensorFlow's profiler")
        return original(*args, **named)

    def _replace(self, owner, name, around):
        """Let around(original, self, …) be called in place of a method, until the end."""
        original = getattr(owner, name)

        def method(*args, **named):
            return around(original, *args, **named)

        setattr(owner, name, method)
        self._undo.callback(setattr, owner, name, original)

    def _span(self, name):
        return self._tf.profiler.experimental.Trace(name)

    def _layer_called(self, original, layer, *args, **named):
        around = self._layers.__dict__.setdefault("names", [])
        around.append(layer.name)
        try:
            with self._span("layer " + "/".join(around)):
                return original(layer, *args, **named)
        finally:
            around.pop()

    def _called_by_graph(self, original, *args):
        """A graph or pipeline calls a function of the script (py_function, generators), in a thread that Python did not start."""
        before = sys.gettrace()
        if before is not None or not self.follows:
            return original(*args)
        sys.settrace(self._called)
        try:
            return original(*args)
        finally:
            self._let_go()
            self._mark(f"line {self._number(_NOWHERE)}")

    def _way_back(self, original, tape, target, sources, *args, **named):
        for source in self._tf.nest.flatten(sources):
            inner = getattr(source, "value", source)  # Keras' own variable has TensorFlow's inside
            self.learnt.add(str(getattr(source if callable(inner) else inner, "name", "")).removesuffix(":0"))
        name = f"backward {next(self._ways_back)} {getattr(tape, '_labsupport_number', '')}"
        if not self._tf.executing_eagerly():  # a graph is traced: nothing is computed
            name = f"tracing {name}"
        try:
            with self._span(name):
                return original(tape, target, sources, *args, **named)
        except BaseException:
            self.cut.add(name)
            raise

    @contextlib.contextmanager
    def _phase(self, original, gauge, name):
        with original(gauge, name):
            yield
        self.phases.append(name)
        self._mark(f"phase {len(self.phases) - 1}")

    def _updated(self, original, optimizer, *args, **named):
        self.optimizers.add(optimizer.name)
        with self._span("update" if self._tf.executing_eagerly() else "tracing update"):
            return original(optimizer, *args, **named)

    def _tape_entered(self, original, tape, *args):
        tape._labsupport_number = next(self._tapes)
        tape._labsupport = self._tf.profiler.experimental.Trace(f"tape {tape._labsupport_number}")
        tape._labsupport.__enter__()
        return original(tape, *args)

    def _tape_left(self, original, tape, *args):
        try:
            return original(tape, *args)
        finally:
            tape._labsupport.__exit__(None, None, None)

    def _maker(self, name):
        """Around what makes variables: notes for whom."""

        def around(original, *args, **named):
            self._making.append(name)
            try:
                return original(*args, **named)
            finally:
                self._making.pop()

        return around

    def _initialised(self, original, variable, *args, **named):
        original(variable, *args, **named)
        if type(variable).__name__ == "_UnreadVariable":  # what an assignment returns: the same variable once more
            return
        maker = "optimizer" if "optimizer" in self._making else self._making[-1] if self._making else "script"
        frame = _caller(sys._getframe())
        line = None if frame is None else self._number((frame.f_code.co_filename, frame.f_lineno))
        self._variables[id(variable)] = weakref.ref(variable), maker, line, next(self._keys)
        self._see(self._variables[id(variable)])

    def _graph_made(self, original, *args, **named):
        """While a graph is made nothing is allocated for lines, and following them would take most of the time."""
        if sys.gettrace() != self._called:
            return original(*args, **named)
        sys.settrace(None)
        try:
            return original(*args, **named)
        finally:
            sys.settrace(self._called)

    def _operation_made(self, original, *args, **named):
        operation = original(*args, **named)
        frame = sys._getframe()
        while frame is not None and not _belongs(frame.f_code.co_filename):
            frame = frame.f_back
        key = frame and (frame.f_code, frame.f_lineno)  # in code that AutoGraph made, which a traceback traces back
        if key not in self._written:
            place = next((f for f in reversed(operation.traceback) if _own(f.filename)), None)
            self._written[key] = None if place is None else self._number((place.filename, place.lineno))
        self.graph[operation.name] = self._written[key], "/".join(self._layers.__dict__.get("names", []))
        return operation


def _caller(frame):
    """The nearest frame of the script above this one, or None."""
    frame = frame.f_back
    while frame is not None and not _own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _address(variable):
    """Where a variable's numbers lie in memory; None where that cannot be told (in a graph, on another device)."""
    import numpy as np
    from tensorflow.python.ops import gen_resource_variable_ops as ops

    try:
        from tensorflow.python.eager import record
    except ImportError:  # its name until TensorFlow 2.12
        from tensorflow.python.eager import tape as record

    try:
        with record.stop_recording():
            return np.asarray(memoryview(ops.read_variable_op(variable.handle, variable.dtype))).ctypes.data
    except Exception:  # not initialised yet, no eager tensor, or a type that NumPy does not have
        return None
