"""What the doctor sees from inside a running script: steps, traces, and what is alive. Runs in the arm's process.

Nothing in the script is changed. A few of TensorFlow's entry points are wrapped to note that a step began or a batch
was taken, and Python's garbage collector is asked now and then what is alive. Sizes are bytes of the objects
themselves; levels and peaks are the allocator's counters.
"""

import functools
import gc
import os
import sys
import threading
import time
import weakref
from collections import Counter
from types import MethodType

import numpy as np

from labsupport.ground import meter
from labsupport.doctor.alive import behind, by_kind, by_name, own, own_frames, own_names, tensor_bytes, variable_bytes

SEND_SECONDS = 0.3
_LARGE_ARRAY = 2**16  # bytes; copies of smaller arrays into tensors are not counted
_MOST_LEVELS = 400
_MOST_HOLDERS = 5


def _place(code, line=None):
    return f"{os.path.basename(code.co_filename)}:{line or code.co_firstlineno}"


def _where():
    frame = next(own_frames(sys._getframe(2)), None)
    return _place(frame.f_code, frame.f_lineno) if frame else "a library"


class Probe:
    """Notes what happens. facts() is what the parent gets; see the keys there."""

    def __init__(self, gauge, tf):
        self.gauge, self.tf = gauge, tf
        self.steps = {}  # key: {"name", "count", "levels": [(number, bytes)], "rise": bytes}
        self.passes = []  # bytes in use when each pass over a data set began
        self.functions = {}  # code: {"name", "place", "calls", "traces"}
        self.converted = {"bytes": 0, "largest": 0, "place": "", "now": 0}  # now: bytes of the array whose copy has begun, not ended
        self.buffers = {}  # stage: (bytes, its name), the most that was seen at once
        self.elements = weakref.WeakKeyDictionary()  # iterator: {stage: bytes of one element}
        self.censuses = []
        self.ignored = []
        self.open = None  # (kind, name, level at its start) of the interval that runs now
        self.failed = None
        self._tape_open = False
        self._in_call = False
        self._sent = 0.0
        self._total = 0
        self._total_at_batch = None
        self._known = weakref.WeakSet()
        self._thread = threading.get_ident()

    # --- intervals

    def _begin(self, kind, name):
        self._end()
        level, _ = self.gauge.lap()
        self.open = (kind, name, level)
        if time.monotonic() - self._sent > SEND_SECONDS:
            self.send()

    def _end(self):
        if self.open is None:
            return
        kind, name, level = self.open
        self.open = None
        now, peak = self.gauge.lap()
        if kind == "step" and level is not None:
            step = self.steps[name]
            step["rise"] = max(step["rise"], peak - level)

    def _begin_step(self, name, kind="step"):
        """kind: "step", or "input" in a loop over batches in which nothing else is a step."""
        step = self.steps.setdefault(name, {"name": name, "kind": kind, "count": 0, "levels": [], "rise": 0, "every": 1})
        self._begin(kind, name)
        step["count"] += 1
        self._total += 1
        if (step["count"] - 1) % step["every"] == 0 and self.open[2] is not None:
            step["levels"].append((step["count"], self.open[2]))
            if len(step["levels"]) > _MOST_LEVELS:
                step["levels"], step["every"] = step["levels"][::2], 2 * step["every"]
        if self._total & (self._total - 1) == 0:  # at steps 1, 2, 4, 8, …: the cost stays small, the last half is seen
            self.take_census()

    def _here(self):
        """Whether this is the script's own thread, running eagerly, outside whatever is counted already."""
        return threading.get_ident() == self._thread and not self._in_call and self.tf.executing_eagerly()

    # --- wrapped entry points

    def install(self):
        from tensorflow.python.client import session
        from tensorflow.python.data.ops import iterator_ops
        from tensorflow.python.eager import backprop
        from tensorflow.python.eager.polymorphic_function import polymorphic_function
        from tensorflow.python.framework import constant_op

        def wrap(owner, name, replacement):
            original = getattr(owner, name)

            @functools.wraps(original)
            def wrapped(*args, **kwargs):
                return replacement(original, *args, **kwargs)

            setattr(owner, name, wrapped)

        wrap(polymorphic_function.Function, "__call__", self._function_call)
        wrap(backprop.GradientTape, "__enter__", self._tape_enter)
        wrap(backprop.GradientTape, "__exit__", self._tape_exit)
        wrap(iterator_ops.OwnedIterator, "__init__", self._iterator_made)
        wrap(iterator_ops.OwnedIterator, "__next__", self._iterator_next)
        wrap(constant_op, "convert_to_eager_tensor", self._convert)
        wrap(session.BaseSession, "run", self._session_run)
        self._forgive_late_settings()

    def _function_call(self, original, function, *args, **kwargs):
        if not self._here():
            return original(function, *args, **kwargs)
        python = function.python_function
        code = getattr(python, "__code__", None) or getattr(getattr(python, "__wrapped__", None), "__code__", None) or examine.__code__
        name = getattr(python, "__name__", "tf.function")
        place = _place(code) if own(code) else "of a library"
        entry = self.functions.setdefault(code, {"name": name, "place": place, "own": own(code), "calls": 0, "traces": 0, "traced_at": [], "changing": "", "instances": 0})
        entry["calls"] += 1
        if function not in self._known:
            self._known.add(function)
            entry["instances"] += 1
        before = function.experimental_get_tracing_count()
        if not self._tape_open:
            self._begin_step(f"{name} ({place})")
        self._in_call = True
        try:
            return original(function, *args, **kwargs)
        except BaseException:
            self.note_failure()
            raise
        finally:
            self._in_call = False
            traced = function.experimental_get_tracing_count() - before
            entry["traces"] += traced
            if traced and len(entry["traced_at"]) < _MOST_LEVELS:
                entry["traced_at"].append(entry["calls"])
                entry["changing"] = entry["changing"] or self._python_value(args, kwargs)
            if not self._tape_open:
                self._end()

    def _python_value(self, args, kwargs):
        """The first argument with a number, a text or a method in it, which a tf.function traces anew for every value."""
        for name, argument in [*enumerate(args, 1), *kwargs.items()]:
            for value in self.tf.nest.flatten(argument):
                if isinstance(value, (int, float, str, MethodType)) and not isinstance(value, bool):
                    return f"{name} is or holds a Python {type(value).__name__} such as {str(value):.40}"
        return ""

    def _tape_enter(self, original, tape):
        if self._here():
            frame = next(own_frames(sys._getframe(2)), None)
            if frame is not None:
                self._begin_step(f"GradientTape ({_place(frame.f_code, frame.f_lineno)})")
                self._tape_open = True
        return original(tape)

    def _tape_exit(self, original, tape, *exception):
        if self._here():
            self._tape_open = False
            if exception and exception[0] is not None:
                self.note_failure()
        return original(tape, *exception)

    def _iterator_made(self, original, iterator, dataset=None, *args, **kwargs):
        if self._here() and dataset is not None:
            self.passes.append(self.gauge.tensors_now())
        original(iterator, dataset, *args, **kwargs)
        if dataset is not None:
            self.elements[iterator] = _element_bytes(dataset)

    def _iterator_next(self, original, iterator):
        if not self._here() or self._tape_open:
            return original(iterator)
        if self._total == self._total_at_batch:  # no step since the last batch: the loop over batches is what repeats
            self._begin_step(f"loop over batches ({_where()})", "input")
        else:
            self._begin("input", "a batch")
        self._total_at_batch = self._total
        try:
            return original(iterator)
        except StopIteration:
            raise
        except BaseException:
            self.note_failure()
            raise
        finally:
            self._end()

    def _convert(self, original, value, *args, **kwargs):
        if not isinstance(value, np.ndarray) or value.nbytes < _LARGE_ARRAY:
            return original(value, *args, **kwargs)
        converted, much_larger = self.converted, value.nbytes > 2 * self.converted["largest"] and self._here()
        converted["bytes"] += value.nbytes
        if value.nbytes > converted["largest"]:
            converted.update(largest=value.nbytes, place=_where())
        if much_larger:  # this may be the last thing that happens: TensorFlow crashes where an array does not fit
            converted["now"] = value.nbytes
            self.take_census()
        tensor = original(value, *args, **kwargs)
        if much_larger:
            converted["now"] = 0
            self.send()
        return tensor

    def _session_run(self, original, *args, **kwargs):
        if threading.get_ident() == self._thread:
            self._begin_step("Session.run")
        try:
            return original(*args, **kwargs)
        finally:
            self._end()

    def _forgive_late_settings(self):
        """A script may configure devices and threads at its start, which is too late here: TensorFlow runs already."""
        config = self.tf.config
        settings = [
            (config, "set_visible_devices"), (config, "set_logical_device_configuration"), (config.experimental, "set_memory_growth"),
            (config.experimental, "set_visible_devices"), (config.experimental, "set_virtual_device_configuration"),
            (config.threading, "set_intra_op_parallelism_threads"), (config.threading, "set_inter_op_parallelism_threads"),
        ]  # fmt: skip
        for owner, name in settings:
            original = getattr(owner, name)

            def forgiving(*args, _original=original, _name=name, **kwargs):
                try:
                    return _original(*args, **kwargs)
                except RuntimeError:
                    self.ignored.append(_name)

            setattr(owner, name, forgiving)

    # --- what is alive

    def _buffered(self, iterator):
        """(stage, bytes, elements) of what a running iterator buffers: tf.data's own model of its pipeline."""
        try:
            model = self.tf.data.experimental.get_model_proto(iterator)
        except (ValueError, TypeError, AttributeError, self.tf.errors.OpError):
            return
        for node in model.nodes.values():
            held, number = node.buffered_bytes, node.buffered_elements
            if node.name.startswith("Cache"):
                held, number = node.bytes_produced, node.num_elements
            one = self.elements.get(iterator, {}).get(node.name.removesuffix("V2").removesuffix("V3"))
            if one is not None and number and held > 1.5 * number * one:
                continue  # tf.data counts a slice of an array as the whole array; such elements share its memory
            yield node.name, held, number

    def note_failure(self):
        """Remember the interval in which an exception began, before unwinding closes it."""
        if self.failed is None and self.open is not None:
            now, peak = self.gauge.lap()
            self.failed = {"kind": self.open[0], "name": self.open[1], "level": self.open[2], "peak": peak}

    def take_census(self, frames=()):
        """What is alive now, by kind, in bytes."""
        gc.collect()
        found = by_kind(gc.get_objects())
        buffered, elements = Counter(), Counter()
        for iterator in found["iterators"]:
            for stage, held, number in self._buffered(iterator):
                buffered[stage] += held
                elements[stage] += number
        for stage, held in buffered.items():
            if held > self.buffers.get(stage, (0, ""))[0]:
                self.buffers[stage] = (held, f"{stage}, {elements[stage]} elements")
        slots = {id(_plain(v)) for optimizer in found["optimizers"] for v in getattr(optimizer, "variables", []) if not callable(v)}
        trainable, inner, models = set(), set(), []
        for model in found["models"]:
            inner.update(id(part) for part in [*_parts(model), getattr(model, "_functional", None)] if part is not model)
            trainable.update(id(_plain(v)) for v in getattr(model, "trainable_variables", []))
        for model in found["models"]:
            if id(model) not in inner:
                size = sum(variable_bytes(_plain(v)) for v in getattr(model, "variables", []))
                if size:
                    models.append((type(model).__name__, size))
        replicas = sum((len(d.values) - 1) * variable_bytes(d.values[0]) for d in found["distributed"])
        sizes = Counter()
        for variable in found["variables"]:
            group = "slots" if id(variable) in slots else "weights" if id(variable) in trainable or (not models and variable.trainable) else "other variables"
            sizes[group] += variable_bytes(variable)
        holders = self._holders(frames)
        census = {
            "step": self._total,
            "level": self.gauge.tensors_now(),
            **{group: sizes[group] for group in ("weights", "slots", "other variables")},
            "held": sum(size for _, size in filter(None, map(behind, found["tensors"]))),
            "replicas": replicas,
            "tensors": sum(map(tensor_bytes, found["tensors"])),
            "arrays": sum(size for _, _, size in holders["arrays"]),
            "models": models,
            "iterators": len(found["iterators"]),
            "buffers": sum(buffered.values()),
            "operations": sum(graph.version for graph in found["graphs"]),
            "holders": {kind: rows[:_MOST_HOLDERS] for kind, rows in holders.items()},
        }
        self.censuses.append(census)
        self.send()

    def _holders(self, frames):
        """Which names of the script hold tensors and arrays: {"tensors": [(name, number, bytes)], "arrays": …}, largest first."""
        held = by_name(own_names([*frames, *own_frames(sys._getframe(1))]))
        rows = {kind: [(name, count[f"number of {kind}"], count[kind]) for name, count in held.items() if count[kind]] for kind in ("tensors", "arrays")}
        return {kind: sorted(found, key=lambda row: -row[2]) for kind, found in rows.items()}

    # --- report

    def facts(self):
        return {
            "steps": list(self.steps.values()),
            "passes": self.passes[1:2] + self.passes[-1:],  # the first begins before models and optimizers are built
            "number_of_passes": len(self.passes),
            "functions": list(self.functions.values()),
            "converted": dict(self.converted),
            "buffers": sorted(self.buffers.values(), reverse=True),
            "censuses": self.censuses,
            "open": None if self.open is None else {"kind": self.open[0], "name": self.open[1], "level": self.open[2]},
            "failed": self.failed,
            "ignored": sorted(set(self.ignored)),
        }

    def send(self):
        self._sent = time.monotonic()
        meter.on_facts(self.facts())


def _element_bytes(dataset):
    """{stage: bytes of one element} of a pipeline's stages that buffer, where their shapes are known."""
    found = {}
    while dataset is not None:
        stage = type(dataset).__name__.strip("_").removesuffix("Dataset").removesuffix("V1")
        try:
            found[stage] = sum(shape.num_elements() * dtype.size for shape, dtype in zip(dataset._flat_shapes, dataset._flat_types))
        except (AttributeError, TypeError, ValueError):
            pass
        dataset = getattr(dataset, "_input_dataset", None)
    return found


def _plain(variable):
    """The tf.Variable behind a Keras 3 variable, or the variable itself."""
    return getattr(variable, "_value", variable)


def _parts(model):
    try:
        return list(model._flatten_layers())
    except Exception:  # a model that is not built, or half taken apart
        return []


def examine(target, args):
    """In the arm: run target(*args) with the probes installed. Its exception goes on; the facts are sent either way."""
    import tensorflow as tf

    probe = Probe(meter.active, tf)
    probe.install()
    frames = []
    try:
        return target(*args)
    except BaseException as error:
        probe.note_failure()
        trace = error.__traceback__
        while trace is not None:
            frames.append(trace.tb_frame)
            trace = trace.tb_next
        raise
    finally:
        probe._end()
        probe.take_census([frame for frame in frames if own(frame.f_code)])
