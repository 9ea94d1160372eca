"""What is alive in this process, by kind, and what it weighs. For the doctor, the checks in tests and the cell magic.

Any object of a process may be met here: half made, deleted, or with attributes that raise. None of these functions
raises for it; it is passed over.
"""

import gc
import math
import mmap
import re
import sys
from collections import Counter

import numpy as np

from labsupport.ground import meter
from labsupport.ground.quiet import without_collections

MEMORY = ("variables", "tensors", "arrays")  # the kinds that alive() and by_name() give bytes for

KINDS = {
    ("tensorflow.python.ops.resource_variable_ops", "BaseResourceVariable"): "variables",
    ("tensorflow.python.framework.ops", "_EagerTensorBase"): "tensors",
    ("tensorflow.python.data.ops.iterator_ops", "OwnedIterator"): "iterators",
    ("tensorflow.python.data.ops.dataset_ops", "DatasetV2"): "datasets",
    ("tensorflow.python.distribute.values", "DistributedVariable"): "distributed",
    ("keras.src.models.model", "Model"): "models",
    ("keras.src.optimizers.base_optimizer", "BaseOptimizer"): "optimizers",
    ("keras.src.engine.training", "Model"): "models",
    ("tf_keras.src.engine.training", "Model"): "models",
    ("keras.src.optimizers.optimizer", "_BaseOptimizer"): "optimizers",
    ("tf_keras.src.optimizers.optimizer", "_BaseOptimizer"): "optimizers",
    ("tensorflow.python.framework.ops", "Graph"): "graphs",
}  # (module, class) of Keras 3, and of Keras 2 also as tf_keras: what its instances are


def ask(question, thing, otherwise=None):
    """question(thing), or `otherwise` where the object does not let itself be looked at."""
    try:
        return question(thing)
    except Exception:  # whatever code of its own the object runs may raise whatever it likes
        return otherwise


def kind_of(cls):
    """A value of KINDS, or "" for what is none of them."""
    names = [(base.__module__, base.__qualname__) for base in cls.__mro__]
    return next((kind for base, kind in KINDS.items() if base in names), "")


class Kinds(dict):
    """{class: its kind, see kind_of}, filled as it is asked. For one walk over objects: it keeps the classes alive."""

    def __missing__(self, cls):
        kind = self[cls] = ask(kind_of, cls, "")
        return kind


class Finder:
    """Finds the objects of this process by kind, again and again.

    The search compares each reference in the process with each class that is searched for (0.7 ms a class, beside 32 ms, in
    a process with 376,000 objects), and of 72 classes ten have instances. Each instance holds its class: as long as nobody
    holds a class more or less than when it had none, it still has none, and is not searched for.
    """

    def __init__(self, but=()):
        self._kinds = [(name, kind) for name, kind in KINDS.items() if kind not in but]
        self._references = {}  # id of a class: how many references to it there were at the last search
        self._without = {}  # the same of those that had no instance

    def as_many(self):
        """Whether there are as many objects of each kind but tensors as at the last search; others may have taken their places.

        Of the class of tensors TensorFlow itself takes a reference more with each operation that is recorded on a tape.
        """
        now = {id(cls): references for cls, references, kind in self._classes() if kind != "tensors"}
        return now.items() <= self._references.items()

    def by_kind(self):
        """{kind: the objects of this process that are of it}, for every kind in KINDS but those that were left out."""
        found, kinds, classes, held = {kind: [] for kind in KINDS.values()}, {}, [], {}
        for cls, references, kind in self._classes():
            kinds[id(cls)], held[id(cls)] = kind, references  # to hash a class may be code of its own
            if self._without.get(id(cls)) != references:
                classes.append(cls)
        self._references, self._without = held, dict(held)
        for thing in instances(classes):
            found[kinds[id(type(thing))]].append(thing)
            self._without.pop(id(type(thing)), None)
        return found

    def _classes(self):
        """[(class, number of references to it, kind)]"""
        found = []
        for (module, name), kind in self._kinds:
            for cls in _with_subclasses(getattr(sys.modules.get(module), name, None)):
                found.append((cls, sys.getrefcount(cls), kind))
        return found


def instances(classes):
    """All objects of these very classes that the collector knows.

    They are found as what refers to their class, and no other object is held meanwhile: a tuple that another thread is just
    making, by tuple(…) of a generator, breaks if anybody else holds it when it gets its length (CPython, tupleobject.c:
    _PyTuple_Resize), as the list of gc.get_objects() would.

    The collector must not run meanwhile. Objects of pybind11 make their dictionary when they are asked what they refer to
    (Python 3.11), and that may start it: it moves what is just being walked over, and the process crashes.
    """
    wanted = set(map(id, classes))
    with without_collections():
        return [thing for thing in gc.get_referrers(*classes) if id(type(thing)) in wanted]


def _with_subclasses(cls):
    """A class and all that are made of it; nothing for None."""
    found = [] if cls is None else [cls]
    for below in () if cls is None else type.__subclasses__(cls):
        found += _with_subclasses(below)
    return found


def tensor_bytes(tensor):
    """Bytes of an eager tensor; 0 for a resource, a ragged or a sparse tensor, a deleted one."""
    return ask(lambda tensor: tensor.shape.num_elements() * tensor.dtype.size, tensor, 0)


def variable_bytes(variable):
    """Bytes of a tf.Variable; 0 for one that is half made."""
    return ask(lambda variable: math.prod(variable.shape) * variable.dtype.size, variable, 0)


def behind(handle):
    """(what, bytes) of the variable behind a resource handle; None for other resources."""
    return ask(_behind, handle)


def _behind(handle):
    data = getattr(handle, "_handle_data", None)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    dtype = sys.modules["tensorflow"].dtypes.as_dtype(data.shape_and_type[0].dtype)
    shape = tuple(dim.size for dim in data.shape_and_type[0].shape.dim)
    return (f"{dtype.name} {shape}", math.prod(shape) * dtype.size) if all(n >= 0 for n in shape) else None


def base_of(array):
    """The array whose memory a view shows, or the array itself."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def array_bytes(array):
    """Bytes of a base array; 0 for a mapped file, which is not held in memory."""
    return 0 if isinstance(array.base, mmap.mmap) else array.nbytes


def running_tensorflow():
    """TensorFlow if this process runs it already, else None: asking it would start it and fix its devices."""
    tf = sys.modules.get("tensorflow")
    context = sys.modules.get("tensorflow.python.eager.context")
    return tf if tf is not None and context is not None and context.context()._initialized else None


def allocator(tf):
    """The counter of the allocator that is read: that of the first GPU, or of the CPU."""
    return meter.AllocatorCounter(tf, "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0")


def counts_everything(counter):
    """Whether an allocator counts small tensors too, found by making one; None if it keeps no statistics."""
    before = counter.read()
    if before is None:
        return None
    with counter.tf.device(counter.device):
        small = counter.tf.zeros([1024])
    return counter.read()[0] - before[0] >= tensor_bytes(small)


def alive():
    """{kind: Counter {(what, bytes of one): number}}, after a garbage collection.

    Kinds: variables (the memory behind their handles, which a graph can keep when the variable object has gone),
    tensors (eager ones), arrays (NumPy's, views counted as what they show), graphs and pipelines (tf.data; 0 bytes).
    """
    gc.collect()
    gc.collect()  # what the first one finalized can have held more
    found = {kind: Counter() for kind in (*MEMORY, "graphs", "pipelines")}
    things = gc.get_objects()
    kinds = Finder().by_kind()
    for tensor in kinds["tensors"]:
        kind, what = ask(_tensor_row, tensor, ("tensors", None))
        if what:
            found[kind][what] += 1
    for graph in kinds["graphs"]:
        found["graphs"][re.sub(r"_\d+$", "", getattr(graph, "name", "graph")), 0] += 1
    for pipeline in kinds["iterators"] + kinds["datasets"]:
        found["pipelines"][type(pipeline).__name__.strip("_"), 0] += 1
    for array in _arrays(things):
        found["arrays"][f"{array.dtype} {array.shape}", array_bytes(array)] += 1
    return found


def _tensor_row(tensor):
    """(kind, (what, bytes)) of an eager tensor: a variable's handle counts as the variable, and other resources as None."""
    if tensor.dtype.name == "resource":
        return "variables", behind(tensor)
    return "tensors", (f"{tensor.dtype.name} {tuple(tensor.shape)}", tensor_bytes(tensor))


def _arrays(things):
    """The base arrays among what these objects refer to.

    Neither arrays nor tuples of nothing but arrays are known to the collector; they are found in what refers to them.
    """
    arrays = {}
    while things:
        untracked = []
        for start in range(0, len(things), 1000):
            for thing in gc.get_referents(*things[start : start + 1000]):
                kind = type(thing)
                if kind is np.ndarray:
                    arrays[id(base_of(thing))] = base_of(thing)
                elif (kind is tuple or kind is dict) and thing and not gc.is_tracked(thing):
                    untracked.append(thing)
        things = untracked
    return list(arrays.values())


def size(counter):
    """Bytes of one kind in what alive() gave."""
    return sum(number * each for (_, each), number in counter.items())
