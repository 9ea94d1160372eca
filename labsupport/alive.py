"""What is alive in this process, by kind and by the names that hold it. For the checks in tests and the cell magic."""

import gc
import math
import mmap
import os
import re
import sys
import types
from collections import Counter

import numpy as np

from labsupport import meter
from labsupport.probes import _LIBRARY, _kind, _own, _own_frames, _tensor_bytes, _variable_bytes

MEMORY = ("variables", "tensors", "arrays")  # the kinds that alive() and by_name() give bytes for
_DEPTH, _MOST_ITEMS = 12, 200_000
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic)


def running_tensorflow():
    """TensorFlow if this process runs it already, else None: asking it for anything would start it and fix its devices."""
    tf = sys.modules.get("tensorflow")
    context = sys.modules.get("tensorflow.python.eager.context")
    return tf if tf is not None and context is not None and context.context()._initialized else None


def device_of(tf):
    """The device whose allocator is read: the first GPU, or the CPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def counts_everything(tf, device):
    """Whether the allocator counts small tensors too, found by making one; None if it keeps no statistics."""
    gauge = meter.Meter(tf, device, tensors_zero=0)
    before = gauge.tensors_now()
    if before is None:
        return None
    with tf.device(device):
        small = tf.zeros([1024])
    return gauge.tensors_now() - before >= _tensor_bytes(small)


def alive():
    """{kind: Counter {(what, bytes of one): number}}, after a garbage collection.

    Kinds: variables (the memory behind their handles, which a graph can keep when the variable object has gone),
    tensors (eager ones), arrays (NumPy's, views counted as what they show), graphs and pipelines (tf.data; 0 bytes).
    """
    gc.collect()
    gc.collect()  # what the first one finalized can have held more
    found = {kind: Counter() for kind in (*MEMORY, "graphs", "pipelines")}
    arrays, classes = {}, {}
    things = gc.get_objects()
    for thing in things:
        kind = classes.get(type(thing))
        if kind is None:
            kind = classes[type(thing)] = _kind(type(thing)) or ("datasets" if _is_dataset(type(thing)) else "")
        if kind == "tensors":
            if thing.dtype.name == "resource":
                what = _behind(thing)
                if what:
                    found["variables"][what] += 1
            else:
                found["tensors"][f"{thing.dtype.name} {tuple(thing.shape)}", _tensor_bytes(thing)] += 1
        elif kind == "graphs":
            found["graphs"][re.sub(r"_\d+$", "", getattr(thing, "name", "graph")), 0] += 1
        elif kind in ("iterators", "datasets"):
            found["pipelines"][type(thing).__name__.strip("_"), 0] += 1
    # Neither arrays nor tuples of nothing but arrays are known to the collector; they are found in what refers to them.
    while things:
        untracked = []
        for start in range(0, len(things), 1000):
            for thing in gc.get_referents(*things[start : start + 1000]):
                kind = type(thing)
                if kind is np.ndarray:
                    arrays[id(_base(thing))] = _base(thing)
                elif (kind is tuple or kind is dict) and thing and not gc.is_tracked(thing):
                    untracked.append(thing)
        things = untracked
    for array in arrays.values():
        found["arrays"][f"{array.dtype} {array.shape}", _array_bytes(array)] += 1
    return found


def size(counter):
    """Bytes of one kind in what alive() gave."""
    return sum(number * each for (_, each), number in counter.items())


def _is_dataset(kind):
    return any(base.__qualname__ == "DatasetV2" and base.__module__.endswith("dataset_ops") for base in kind.__mro__)


def _behind(handle):
    """(what, bytes) of the variable behind a resource handle; None for other resources."""
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    dtype = sys.modules["tensorflow"].dtypes.as_dtype(data.shape_and_type[0].dtype)
    shape = tuple(dim.size for dim in data.shape_and_type[0].shape.dim)
    return (f"{dtype.name} {shape}", math.prod(shape) * dtype.size) if all(n >= 0 for n in shape) else None


def _base(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _array_bytes(array):
    return 0 if isinstance(array.base, mmap.mmap) else array.nbytes  # a mapped file is not held in memory


def by_name(names):
    """{name: Counter of bytes by kind, and of "items" other than numbers and text} for {name: object}: what each reaches through containers and attributes.

    What two names hold counts for the first.
    """
    seen = set()
    return {name: _weigh(value, Counter(), seen, _DEPTH) for name, value in names.items()}


def _weigh(value, count, seen, depth):
    if id(value) in seen or len(seen) > _MOST_ITEMS or isinstance(value, (*_PLAIN, types.ModuleType)):
        return count
    kind = "" if isinstance(value, (list, dict, tuple)) else _kind(type(value))
    seen.add(id(value))
    if kind == "tensors":
        count[kind] += _tensor_bytes(value)
    elif kind == "variables":
        count[kind] += _variable_bytes(value)
    elif isinstance(value, np.ndarray):
        base = _base(value)
        if base is value or id(base) not in seen:
            seen.add(id(base))
            count["arrays"] += _array_bytes(base)
    elif depth:
        items = _items(value)
        if isinstance(value, (list, dict, set)) or type(value).__name__ == "deque":
            count["items"] += sum(not isinstance(item, _PLAIN) for item in items)
        for item in items:
            _weigh(item, count, seen, depth - 1)
    return count


def _items(value):
    """What an object holds, as far as it belongs to the person who wrote it, or to Keras."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)) or type(value).__name__ == "deque":
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return list(closure(value).values()) + list(value.__defaults__ or ()) if _own(value.__code__) else []
    if isinstance(value, type):
        return list(vars(value).values()) if _own_module(sys.modules.get(value.__module__)) else []
    if type(value).__module__.split(".")[0] == "tensorflow":
        return []
    return list(getattr(value, "__dict__", {}).values())


def closure(function):
    """{name: object} of what a function took from the scopes around it."""
    held = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            held[name] = cell.cell_contents
        except ValueError:  # not filled yet
            pass
    return held


def _own_module(module):
    file = getattr(module, "__file__", None)
    return file is not None and not any(part in os.path.abspath(file) for part in _LIBRARY)


def own_names(frame):
    """{name: object} for everything that the person's own modules and the running functions from `frame` on hold by name."""
    names = {}
    for module in list(sys.modules.values()):
        if _own_module(module) or getattr(module, "__name__", "") == "__main__":
            names.update({f"{module.__name__}.{name}": value for name, value in list(vars(module).items()) if not name.startswith("__")})
    for caller in _own_frames(frame):
        if caller.f_code.co_name != "<module>":
            names.update({f"{name} in {caller.f_code.co_name}()": value for name, value in caller.f_locals.items()})
    return names
