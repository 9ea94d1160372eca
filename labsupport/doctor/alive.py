"""What is alive in this process, by kind and by the names that hold it. For the doctor, the checks in tests and the cell magic."""

import gc
import math
import mmap
import os
import re
import sys
import types
from collections import Counter

import numpy as np

from labsupport.ground import meter
from labsupport.ground.result import is_own

MEMORY = ("variables", "tensors", "arrays")  # the kinds that alive() and by_name() give bytes for
_DEPTH, _MOST_ITEMS = 12, 200_000
_PLAIN = (int, float, complex, str, bytes, type(None), np.generic)

KINDS = {
    "resource_variable_ops.BaseResourceVariable": "variables",
    "ops._EagerTensorBase": "tensors",
    "ops.EagerTensor": "tensors",
    "iterator_ops.OwnedIterator": "iterators",
    "dataset_ops.DatasetV2": "datasets",
    "values.DistributedVariable": "distributed",
    "keras.src.models.model.Model": "models",
    "keras.src.engine.training.Model": "models",
    "keras.src.optimizers.base_optimizer.BaseOptimizer": "optimizers",
    "keras.src.optimizers.optimizer._BaseOptimizer": "optimizers",
    "framework.ops.Graph": "graphs",
}  # ends of a base class's full name (of Keras 3, and of Keras 2 as tf_keras): what it is


def kind_of(cls):
    """A value of KINDS, or "" for what is none of them."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__]
    return next((kind for end, kind in KINDS.items() if any(name.endswith(end) for name in names)), "")


def by_kind(things):
    """{kind: those of these objects that are of it}, for every kind in KINDS."""
    found = {kind: [] for kind in KINDS.values()}
    kinds = {}  # of the few classes that most objects share
    for thing in things:
        kind = kinds.get(type(thing))
        if kind is None:
            kind = kinds[type(thing)] = kind_of(type(thing))
        if kind:
            found[kind].append(thing)
    return found


def own(code):
    """Whether code is the person's rather than a library's."""
    return is_own(code.co_filename)


def own_frames(frame):
    """The person's frames, innermost first, without those of libraries."""
    while frame is not None:
        if own(frame.f_code):
            yield frame
        frame = frame.f_back


def tensor_bytes(tensor):
    try:
        return tensor.shape.num_elements() * tensor.dtype.size
    except (AttributeError, TypeError, ValueError):  # a resource, a ragged or a sparse tensor, a deleted one
        return 0


def variable_bytes(variable):
    try:
        return math.prod(variable.shape) * variable.dtype.size
    except (AttributeError, TypeError, ValueError):
        return 0


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
    return gauge.tensors_now() - before >= tensor_bytes(small)


def alive():
    """{kind: Counter {(what, bytes of one): number}}, after a garbage collection.

    Kinds: variables (the memory behind their handles, which a graph can keep when the variable object has gone),
    tensors (eager ones), arrays (NumPy's, views counted as what they show), graphs and pipelines (tf.data; 0 bytes).
    """
    gc.collect()
    gc.collect()  # what the first one finalized can have held more
    found = {kind: Counter() for kind in (*MEMORY, "graphs", "pipelines")}
    arrays, things = {}, gc.get_objects()
    kinds = by_kind(things)
    for tensor in kinds["tensors"]:
        if tensor.dtype.name == "resource":
            what = behind(tensor)
            if what:
                found["variables"][what] += 1
        else:
            found["tensors"][f"{tensor.dtype.name} {tuple(tensor.shape)}", tensor_bytes(tensor)] += 1
    for graph in kinds["graphs"]:
        found["graphs"][re.sub(r"_\d+$", "", getattr(graph, "name", "graph")), 0] += 1
    for pipeline in kinds["iterators"] + kinds["datasets"]:
        found["pipelines"][type(pipeline).__name__.strip("_"), 0] += 1
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


def behind(handle):
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
    kind = "" if isinstance(value, (list, dict, tuple)) else kind_of(type(value))
    seen.add(id(value))
    if kind == "tensors":
        count[kind] += tensor_bytes(value)
        count["number of tensors"] += 1
    elif kind == "variables":
        count[kind] += variable_bytes(value)
    elif isinstance(value, np.ndarray):
        base = _base(value)
        if base is value or id(base) not in seen:
            seen.add(id(base))
            count["arrays"] += _array_bytes(base)
            count["number of arrays"] += 1
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
        return list(closure(value).values()) + list(value.__defaults__ or ()) if own(value.__code__) else []
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
    return file is not None and is_own(os.path.abspath(file))


def own_names(frames):
    """{name: object} for everything that the person's own modules and these running functions hold by name."""
    names = {}
    for module in list(sys.modules.values()):
        main = getattr(module, "__name__", "") == "__main__"
        if main or _own_module(module):
            names.update({name if main else f"{module.__name__}.{name}": value for name, value in list(vars(module).items())})
    for frame in frames:
        names = {**frame.f_globals, **names}  # a function that came from elsewhere has a namespace which is no module here
        if frame.f_code.co_name != "<module>":
            names.update({f"{name} in {frame.f_code.co_name}()": value for name, value in frame.f_locals.items()})
    return {name: value for name, value in names.items() if not name.split(".")[-1].startswith("__")}
