"""What the doctor notes in a running script: steps, batches, traces, copies. Runs in the arm's process.

Nothing in the script is changed. A few of TensorFlow's entry points are wrapped to note that a step began or a batch
was taken (Intervals), and now and then everything that is alive is counted (Censuses). Sizes are bytes of the objects
themselves; levels and peaks are the allocator's counters. What goes wrong in here never reaches the script.
"""

import contextlib
import functools
import gc
import inspect
import os
import sys
import threading
import time
import traceback
import weakref
from types import MethodType

import numpy as np

from labsupport.doctor import cycles, failing
from labsupport.doctor.alive import Finder, instances
from labsupport.doctor.census import Censuses
from labsupport.doctor.intervals import Intervals
from labsupport.doctor.made import Made
from labsupport.doctor.names import own, own_frames
from labsupport.doctor.wrapping import OURS, quietly, wrap
from labsupport.ground import meter
from labsupport.ground.budget import MIB
from labsupport.ground.oom import wanted_shape
from labsupport.ground.quiet import without_collections
from labsupport.ground.record import Converted, Facts, Failing, Function, Kind, in_words, sendable
from labsupport.ground.result import is_own, line_of, short
from labsupport.peak.parts import largest

SEND_SECONDS = 0.3  # as often as a notebook's plot is drawn anew
_LARGE_ARRAY = 2**16  # bytes; copies of smaller arrays into tensors are not counted, since there may be many a step
_MOST_HOLDERS = 6  # lines told: more do not help to find the first
_MORE = 1.2  # times as much in use: then what is alive is counted anew while a first call runs
# Those of the first steps are always taken: rules compare both halves of a run, and one of seconds has no others. For more there are
# so many processor seconds where nothing grows and where something does, each and a share of the time since: one takes about
# 50 ms, reckoned from its parts, more where garbage is collected. Half a minute of a healthy run then pays some 2 %.
_FIRST_STEPS, _FOR_CENSUSES, _FOR_GROWTH, _SHARE_FOR_CENSUSES = 1024, 0.5, 2, 0.005
_GROWING, _GROWN_OUTSIDE = 1.02, 8 * MIB  # times what was in use, bytes of the process: then something grows
_FIRST_OF = 4  # kinds of steps: before the training step come one or two functions that make variables
_MOST_TRACES = 400  # of one function: the rules need to know which half of its calls they fall in


@functools.cache  # a loop asks for one line at each step
def _place(file, line):
    found = line_of(file, line)
    return sendable(short(os.path.basename(found.place), found.number))


def _at(frame=None):
    """(file, line) of the script that runs now, or in another thread's frame; None where it is a library's thread."""
    frame = next(own_frames(frame or sys._getframe()), None)
    return (frame.f_code.co_filename, frame.f_lineno) if frame else None


def _where(frame=None):
    """The same in short; "" for None."""
    at = _at(frame)
    return _place(*at) if at else ""


def _traced_at():
    """The line of the script that is being traced; AutoGraph runs a copy of it, in a file of its own. "" where none is."""
    frames = [
        frame for frame in sys.modules["tensorflow.python.util.tf_stack"].extract_stack() if is_own(frame.filename)
    ]
    return _place(frames[-1].filename, frames[-1].lineno) if frames else ""


def _code(function):
    return getattr(function, "__code__", None)


def _described(python):
    """The Function for the Python function of a tf.function.

    own is False for a method, which TensorFlow wraps: each object has a
    tf.function of its own, as Keras makes one for each model.
    """
    code, outer = _code(inspect.unwrap(python)), _code(python)
    mine = code and own(code)
    place = _place(code.co_filename, code.co_firstlineno) if mine else _where()
    name = sendable(getattr(python, "__name__", "tf.function"))
    return Function(name, place, own=outer is not None and own(outer), called=not mine)


def _shapes(variables):
    """Their shapes as lists, each once, without those that are not known."""
    shapes = {tuple(variable.shape) for variable in variables}
    return [list(shape) for shape in sorted(shapes) if None not in shape]


class _Ending:
    """Around a call: the interval that is open ends with it."""

    def __init__(self, probe):
        self._probe = probe

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if kind is not None and issubclass(kind, StopIteration):
            self._probe.ended_pass()
        elif kind is not None:
            self._probe.note_failure()
        self._probe.end()


class Probe:
    """Wraps entry points and notes what goes through them; send() reports the Facts so far to the watcher."""

    def __init__(self, gauge, tf):
        self._gauge, self._tf, self._eagerly = gauge, tf, tf.executing_eagerly
        self._intervals, self._interval = Intervals(gauge), _Ending(self)
        self._made = Made(_where)
        self._censuses = Censuses(gauge, tf, self._made)
        self._functions = {}  # code: Function
        self._converted, self._baked = Converted(), Converted()
        self._evaluating = False
        self._passed_at = ""
        self._passes = []  # bytes in use when each pass over a data set began
        self._ignored = set()
        self._uncollected, self._cycles = False, None  # see Facts
        self._holders = []
        self.unseen = []  # see Facts
        self._known = weakref.WeakKeyDictionary()  # tf.function: its Function
        self._tape_open = self._in_call = self._layer_runs = False
        self._called = None  # the Function that runs
        self._tape_at = None  # (file, line) of the last one
        self._failing = Failing()
        self._shapes = weakref.WeakKeyDictionary()  # tf.function: shapes of its arguments, where they matter
        self._total_at_batch = self._total_at_pass = self._total_at_answer = None
        self._answered_at = set()  # lines that have called a layer since the last step
        self._sent = 0.0
        self._looked_at, self._level = None, MIB
        self._begun, self._spent = time.monotonic(), 0.0
        self._counted, self._process = 0, 0  # the highest level and resident set at a census before a step
        self._in_tape = self._most_in_tape = 0  # batches drawn while one tape is open
        self._thread = threading.main_thread().ident

    def install(self):
        """Wrap the entry points. Each wrapper takes the original, then its arguments."""
        from tensorflow.python.client import session
        from tensorflow.python.data.ops import iterator_ops
        from tensorflow.python.eager import backprop
        from tensorflow.python.eager.polymorphic_function import polymorphic_function
        from tensorflow.python.framework import constant_op, tensor_util
        from tensorflow.python.util import traceback_utils

        # Inside of TensorFlow's own filter of tracebacks, which then takes out our frames, too.
        polymorphic_function.Function.__call__ = inspect.unwrap(polymorphic_function.Function.__call__)
        wrap(polymorphic_function.Function, "__call__", self._function_call)
        function = polymorphic_function.Function
        function.__call__ = traceback_utils.filter_traceback(function.__call__)
        _stay_out_of_tracebacks(traceback_utils)
        for name in {"walk_tb", "_walk_tb_with_full_positions"} & {*vars(traceback)}:  # the second: since Python 3.11
            wrap(traceback, name, _other_frames)
        wrap(backprop.GradientTape, "__enter__", self._tape_enter)
        wrap(backprop.GradientTape, "__exit__", self._tape_exit)
        wrap(iterator_ops.OwnedIterator, "__init__", self._iterator_made)
        wrap(iterator_ops.OwnedIterator, "__next__", self._iterator_next)
        wrap(constant_op, "convert_to_eager_tensor", self._convert)
        wrap(tensor_util, "make_tensor_proto", self._bake)
        wrap(session.BaseSession, "run", self._session_run)
        self._made.watch_tensorflow()
        self._censuses.collections.watch()

    @quietly
    def see_keras(self, keras):
        """Wrap Keras' entry points, once it is loaded."""
        traceback_utils = sys.modules["keras.src.utils.traceback_utils"]
        _stay_out_of_tracebacks(traceback_utils)
        self._made.watch_keras(keras)
        self._symbolic = getattr(keras, "KerasTensor", ())  # Keras 2 has none
        for cls, name, wrapper in (
            (keras.Model, "evaluate", self._evaluate),
            (keras.layers.Layer, "__call__", self._layer_call),
        ):
            wrap(cls, name, wrapper)
            setattr(cls, name, traceback_utils.filter_traceback(getattr(cls, name)))

    # --- what is noted

    def _here(self):
        """Whether this is the script's own thread, running eagerly, outside whatever is counted already."""
        return not self._in_call and threading.get_ident() == self._thread and self._eagerly()

    @quietly
    def _begin_step(self, kind, place, name=""):
        self._intervals.begin_step(kind, place, name)
        total, steps, now = self._intervals.total, self._intervals.steps, self._intervals.open
        first = steps[now.name].count == 1 and len(steps) <= _FIRST_OF  # it may be the last, where it crashes
        turn = self._intervals.in_turn
        level = now.level or 0
        if first or turn and total <= _FIRST_STEPS or (turn or self._has_grown(level)) and self._affordable(level):
            self._counted = max(level, self._counted)
            self._process = max(self._gauge.process_now() or 0, self._process)
            self.take_census(extra=not turn)
        self._censuses.collections.step_begins()
        self._made.step_begins()
        self._send_sometimes()

    def _affordable(self, level):
        """Whether one more census leaves the script its time."""
        most = _SHARE_FOR_CENSUSES * (time.monotonic() - self._begun)
        if self._spent < most + _FOR_CENSUSES:
            return True
        if self._spent > most + _FOR_GROWTH:
            return False
        growing = level > max(_GROWING * self._counted, self._counted + MIB)
        return growing or (self._gauge.process_now() or 0) > self._process + _GROWN_OUTSIDE

    @quietly
    def _begin_batch(self):
        if self._intervals.total == self._total_at_batch:
            # No step since the last batch: the loop over batches is what repeats.
            self._begin_step(Kind.LOOP, _where())
        else:
            self._intervals.begin(Kind.BATCH)
            self._send_sometimes()
        self._total_at_batch = self._intervals.total

    def ended_pass(self):
        """The first batch of the next pass is no sign of a loop in which nothing else runs."""
        self._total_at_batch = None

    @quietly
    def end(self):
        """Nothing that is counted runs any more."""
        self._intervals.end()

    @quietly
    def note_failure(self):
        """An exception has begun, and has not unwound yet."""
        self._intervals.note_failure()
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = _without_our_frames

    @quietly
    def script_ends(self, error):
        """The script's own code has ended, by an error where one is given; the last step has ended, too."""
        trace = failing.own_trace(error)
        if error is not None and not self._is_beside(trace):
            self.note_failure()
        self.end()
        if error is not None:
            self._look_under_tape([frame for frame, _ in trace], error)

    @quietly
    def _is_beside(self, trace):
        """Whether what failed lies beside the last tape's step: not in what repeats with it, such as the body of its loop."""
        open_one = self._intervals.open
        if open_one is None or self._tape_open or open_one.kind is not Kind.TAPE or not trace:
            return False
        first, last = failing.repeated_with(*self._tape_at)
        same = self._tape_at[0]
        return not any(frame.f_code.co_filename == same and first <= line <= last for frame, line in trace)

    @quietly
    def name_holders(self, seen):
        """Tell who held memory at the peak; seen: of recorded()."""
        window = f"recorded were {seen.parts.window}" if seen.parts and seen.parts.window else ""
        found = largest(seen.parts, _MOST_HOLDERS) if seen.parts else [f"unknown: {seen.why}"]
        self._holders = [sendable(row) for row in [*found, seen.lines, window] if row]

    @quietly
    def last_census(self, error):
        """Count what is alive at the end. Where garbage may be what filled the memory, it is told what that is of."""
        if self._uncollected or error is not None:
            self._cycles = cycles.most_common()
        self._take_census(frames=[frame for frame, _ in failing.own_trace(error)])

    @quietly
    def take_census(self, extra=False):
        """Count what is alive; extra as for Censuses.take. Where the script has switched the collector off, nothing is collected."""
        collects = gc.isenabled()
        self._uncollected = self._uncollected or not collects
        self._take_census(extra=extra, collects=collects)

    def _take_census(self, **how):
        began = time.thread_time()
        with (
            without_collections()
        ):  # or what it makes would start the collector, and the garbage be gone before it is counted
            self._censuses.take(self._intervals.total, **how)
        self._spent += time.thread_time() - began
        self.send()

    # --- wrapped entry points

    def _function_call(self, original, function, *args, **kwargs):
        if not self._here():
            if self._in_call and function._jit_compile and self._called is not None:  # in a trace of another
                self._called.compiled = True
            return original(function, *args, **kwargs)
        noted = self._call_begins(function)
        self._in_call = True
        try:
            return original(function, *args, **kwargs)
        except BaseException as error:
            self.note_failure()
            self._look_into(function, (args, kwargs), error)
            raise
        finally:
            self._in_call = False
            self._call_ends(function, noted, args, kwargs)

    @quietly
    def _call_begins(self, function):
        """(Function, traces so far) of a tf.function that is called now."""
        noted = self._known.get(function)
        if noted is None:
            code = _code(inspect.unwrap(function.python_function))
            if code not in self._functions:
                self._functions[code] = _described(function.python_function)
            noted = self._known[function] = self._functions[code]
            noted.instances += 1
        self._called = noted
        noted.calls += 1
        before = function.experimental_get_tracing_count()
        if not self._tape_open:
            kind = Kind.EVALUATION if self._evaluating else Kind.FUNCTION
            place = _where() if noted.called else noted.place  # a library's is called from many lines
            self._begin_step(kind, place, f"{kind} {noted.name} ({in_words(place, noted.called)})")
        return noted, before

    def _evaluate(self, original, *args, **kwargs):
        self._evaluating = True
        try:
            return original(*args, **kwargs)
        finally:
            self._evaluating = False

    def _layer_call(self, original, *args, **kwargs):
        if self._here() and not (self._tape_open or self._layer_runs):
            return self._outermost_call(original, args, kwargs)
        return original(*args, **kwargs)

    def _outermost_call(self, original, args, kwargs):
        self._begin_answer(args)
        self._layer_runs = True
        try:
            return original(*args, **kwargs)
        finally:
            self._layer_runs = False

    @quietly
    def _begin_answer(self, args):
        """A model, or a layer by itself, is called without a graph or a tape. Where a line calls again, and no other step has run since, its calls are what repeats."""
        if any(isinstance(one, self._symbolic) for one in self._tf.nest.flatten(args[1:])):
            return  # a model is being made
        if self._intervals.total != self._total_at_answer:
            self._answered_at = set()
        place = _where()
        if place in self._answered_at:
            self._begin_step(Kind.ANSWER, place)
            self._intervals.end()
            self._answered_at = set()
        self._answered_at.add(place)
        self._total_at_answer = self._intervals.total

    @quietly
    def _call_ends(self, function, noted, args, kwargs):
        if not self._tape_open:
            self.end()
        entry, before = noted
        traced = function.experimental_get_tracing_count() - before
        entry.traces += traced
        entry.compiled = entry.compiled or bool(function._jit_compile)
        if traced or function._jit_compile:
            self._note_shapes(function, entry, args, kwargs)
        if traced and len(entry.traced_at) < _MOST_TRACES:
            entry.traced_at.append(entry.calls)
            entry.changing = entry.changing or self._python_value(args, kwargs)

    @quietly
    def _note_shapes(self, function, entry, args, kwargs):
        """A new shape of an argument makes a new trace; XLA compiles a program for each, also where TensorFlow traces once."""
        flat = self._tf.nest.flatten((args, kwargs))
        if any(hasattr(one, "element_spec") for one in flat):
            return  # an iterator: of what shapes it gives nothing is known here
        shapes = tuple(tuple(one.shape) for one in flat if isinstance(one, (self._tf.Tensor, np.ndarray)))
        known = self._shapes.setdefault(function, set())
        if shapes not in known:
            known.add(shapes)
            entry.shapes += 1
            if len(entry.shaped_at) < _MOST_TRACES:
                entry.shaped_at.append(entry.calls)

    @quietly
    def _look_into(self, function, arguments, error):
        """A call has failed: what it was given, and what its graph says of the tensor that found no room."""
        wanted = wanted_shape(str(error))
        if wanted is None or self._failing != Failing():
            return
        weights = _shapes(Finder().by_kind()["variables"])
        found = {"wanted": wanted, "given": failing.shapes_given(arguments), "weights": weights}
        for concrete in function._list_all_concrete_functions():
            if at := failing.made_in(concrete.graph, wanted):
                found["made_at"] = _place(*at)
            if (uses := failing.uses_in(concrete.graph)) > found.get("uses", 0):
                code = _code(inspect.unwrap(function.python_function))
                loop = failing.loop_under_tape(code.co_filename, code.co_firstlineno)
                found |= {"uses": uses, "loop": _place(*loop) if loop else ""}
        self._failing = Failing(**found)

    @quietly
    def _look_under_tape(self, frames, error):
        """The same of a step without a graph, by the tape that was opened last."""
        wanted = wanted_shape(str(error))
        if wanted is None or self._failing != Failing() or self._intervals.failed is None:
            return
        alive = Finder().by_kind()
        given = failing.shapes_in(frames, self._tape_at)
        found = {"wanted": wanted, "given": given, "weights": _shapes(alive["variables"])}
        if tapes := instances([self._tf.GradientTape]):
            loop = failing.loop_under_tape(*self._tape_at)
            most = max(failing.uses(tape, alive["tensors"]) for tape in tapes)
            found |= {"uses": most, "loop": _place(*loop) if loop else ""}
        self._failing = Failing(**found)

    @quietly
    def look_between(self):
        """Called now and then from another thread: what a call that takes long buffers meanwhile."""
        now = self._intervals.total, self._intervals.open
        if now == self._looked_at and now[1] is not None:
            self._censuses.count_buffers()
            level = self._gauge.tensors_now() or 0
            if (
                not now[1].kind.of_input
                and self._intervals.steps[now[1].name].count == 1
                and level > _MORE * self._level
            ):
                self._level = level  # variables may be made in a first call, and it may be the last
                self._censuses.take(now[0], between=True)
            self.send()
        self._looked_at = now

    def _python_value(self, args, kwargs):
        """The first argument with a number, a text or a method in it: a tf.function traces anew for every value."""
        for name, argument in [*enumerate(args, 1), *kwargs.items()]:
            for value in self._tf.nest.flatten(argument):
                if isinstance(value, (int, float, str, MethodType)) and not isinstance(value, bool):
                    return f"{name} is or holds a Python {type(value).__name__} such as {sendable(value):.40}"
        return ""

    def _tape_enter(self, original, tape):
        if self._here():
            if at := _at():
                self._begin_step(Kind.TAPE, _place(*at))
                self._tape_open, self._in_tape = True, 0
                self._tape_at = at
        elif self._in_call and self._called is not None:
            self._called.tapes += 1
        return original(tape)

    def _tape_exit(self, original, tape, *exception):
        if self._here():
            self._tape_open = False
            if exception and exception[0] is not None:
                self.note_failure()
        return original(tape, *exception)

    def _iterator_made(self, original, iterator, dataset=None, *args, **kwargs):
        here = dataset is not None and self._here()
        if here:
            self._begin_pass()
        with self._interval if here and not self._tape_open else contextlib.nullcontext():
            original(iterator, dataset, *args, **kwargs)
        if dataset is not None:
            quietly(self._censuses.note_iterator)(iterator, dataset)

    @quietly
    def _begin_pass(self):
        level = self._gauge.tensors_now()
        if self._intervals.total == self._total_at_pass:
            del self._passes[-1:]  # nothing ran since: Keras' fit makes two iterators for an epoch
        self._total_at_pass = self._intervals.total
        self._passes.append(level)
        self._passed_at = _where()
        if not self._tape_open:  # what runs is the tape's step
            self._intervals.begin(Kind.ITERATOR)
        self._count_growth(level)  # an iterator copies the tensors of its data set, and may crash there

    def _count_growth(self, level):
        if self._has_grown(level or 0) and self._affordable(level):
            self._counted = level
            self.take_census(extra=True)

    def _has_grown(self, level):
        """Whether there is so much more in use than at the last census that it may be what fills the budget."""
        return level > max(_MORE * self._counted, self._counted + MIB)

    def _iterator_next(self, original, iterator):
        if not self._here():
            return original(iterator)
        if self._tape_open:
            self._in_tape += 1
            self._most_in_tape = max(self._most_in_tape, self._in_tape)
            return original(iterator)
        self._begin_batch()
        with self._interval:
            return original(iterator)

    def _convert(self, original, value, *args, **kwargs):
        if not isinstance(value, np.ndarray) or value.nbytes < _LARGE_ARRAY:
            return original(value, *args, **kwargs)
        much_larger = self._note_copy(value.nbytes)
        tensor = original(value, *args, **kwargs)
        if much_larger:
            self._converted.now = 0
            self.send()
        return tensor

    @quietly
    def _note_copy(self, size):
        """An array is about to be copied into a tensor; gives whether it is much larger than any before."""
        converted = self._converted
        much_larger = size > 2 * converted.largest and self._here()
        converted.bytes += size
        if size > converted.largest:
            converted.largest, converted.place = size, _where()
        if much_larger:  # this may be the last thing that happens: TensorFlow crashes where an array does not fit
            converted.now = size
            self.take_census()
        elif self._here():
            self._count_growth(self._gauge.tensors_now())  # or the last of many is
        return much_larger

    def _bake(self, original, values, *args, **kwargs):
        if isinstance(values, np.ndarray) and values.nbytes >= _LARGE_ARRAY:
            self._note_baked(values.nbytes)
        return original(values, *args, **kwargs)

    @quietly
    def _note_baked(self, size):
        """An array becomes a constant of a graph."""
        baked = self._baked
        baked.bytes += size
        if size > baked.largest:
            baked.largest, baked.place = size, _traced_at() or _where()
            self.send()

    def _session_run(self, original, *args, **kwargs):
        if threading.get_ident() == self._thread:
            self._begin_step(Kind.SESSION, _where())
        try:
            return original(*args, **kwargs)
        finally:
            self.end()

    def forgive_late_settings(self):
        """For a script that configures devices and threads at its start, where that is too late: they are set up already."""
        config = self._tf.config
        settings = {
            config: ("set_visible_devices", "set_logical_device_configuration"),
            config.experimental: ("set_memory_growth", "set_visible_devices", "set_virtual_device_configuration"),
            config.threading: ("set_intra_op_parallelism_threads", "set_inter_op_parallelism_threads"),
        }
        for owner, names in settings.items():
            for name in names:
                wrap(owner, name, functools.partial(self._forgiving, name))

    def _forgiving(self, name, original, *args, **kwargs):
        try:
            return original(*args, **kwargs)
        except (RuntimeError, ValueError):
            self._ignored.add(name)

    # --- report

    def _send_sometimes(self):
        if time.monotonic() - self._sent > SEND_SECONDS:
            self.send()

    @quietly
    def send(self):
        """Report the Facts so far."""
        self._sent = time.monotonic()
        # One that nothing has followed yet may never be read: Keras' fit makes such a one at its end.
        passes = self._passes[:-1] if self._intervals.total == self._total_at_pass else self._passes
        meter.report(
            Facts(
                steps=list(self._intervals.steps.values()),
                passes=passes[1:2] + passes[-1:],  # the first begins before models and optimizers are built
                number_of_passes=len(passes),
                passed_at=self._passed_at,
                functions=list(self._functions.values()),
                converted=self._converted,
                baked=self._baked,
                buffers=sorted(self._censuses.buffers.values(), key=lambda buffer: -buffer.size),
                censuses=self._censuses.taken,
                open=self._intervals.open,
                failed=self._intervals.failed,
                failing=self._failing,
                made=self._made.lines(),
                recomputed=self._made.recomputed,
                segments=self._made.segments,
                uncollected=self._uncollected,
                cycles=self._cycles,
                in_tape=self._most_in_tape,
                ignored=sorted(self._ignored),
                holders=self._holders,
                unseen=self.unseen,
            )
        )


def _stay_out_of_tracebacks(module):
    """Let TensorFlow's or Keras' filter of tracebacks (traceback_utils.py) take out the frames of these files."""
    module._EXCLUDED_PATHS = (*module._EXCLUDED_PATHS, OURS)


def _other_frames(original, trace):
    """What traceback.print_exc() and logging.exception() make their text of, without our wrappers' frames."""
    return (row for row in original(trace) if not row[0].f_code.co_filename.startswith(OURS))


def _without_our_frames(kind, error, trace):
    """sys.excepthook after an exception has passed one of our wrappers: as Python shows it, without them."""
    first, last = trace, None
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(OURS):
            last = trace
        elif last is not None:  # the script's own frames come first
            last.tb_next = trace.tb_next
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(first), first)
