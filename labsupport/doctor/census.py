"""What is alive in a running script, counted by kind and by the names that hold it. Runs in the arm's process."""

import gc
import sys
import weakref
from collections import Counter
from functools import cache
from typing import NamedTuple

from labsupport.doctor.alive import Finder, ask, behind, tensor_bytes, variable_bytes
from labsupport.doctor.filling import filled_at
from labsupport.doctor.made import stage
from labsupport.doctor.names import by_name, own_frames, own_names
from labsupport.doctor.wrapping import quietly
from labsupport.ground.budget import MIB
from labsupport.ground.record import Buffer, Census, Holder, Model, sendable

_MOST_PLACED = 2  # as many as the rules name
_FEW = 100  # objects in a container: fewer do not make a process grow
_MOST_HOLDERS = 5  # the rules name two; a census travels whole with every report
# tf.data counts a slice of an array as the whole array, at least twice the slice. Such elements share memory that is
# counted elsewhere. What an element really holds beside the bytes of its shape is less than half of them.
_A_SLICE = 1.5
_CACHES = ("Cache", "MemoryCache")  # begins of the names that tf.data's model has for a cache in memory
_ROUNDED_TO = 256  # bytes: what the allocator makes of a smaller tensor (bfc_allocator.h: kMinAllocationSize)
# What is alive must have grown by this much, in bytes and as a share, before a census collects garbage: GROWTH_LEAST and
# GROWTH_SHARE of suspects.py, which is not loaded into a script.
_GROWN, _GROWN_SHARE = MIB, 0.02


class _Search(NamedTuple):
    """What a search of the process found; sizes in bytes."""

    level: int | None
    process: int
    tensors: int
    held: int  # behind handles of variables
    things: dict  # kind: weak references


class Collections:
    """What Python's collector has freed since the last step began: bytes of tensors.

    It also runs by itself, whenever enough objects were made, and be it for an error's traceback: the garbage that filled
    the budget may be gone before a census can find it. What the collector lets go of and is freed only a moment later is
    missed.
    """

    def __init__(self, gauge):
        self._gauge = gauge
        self._level = self._peak = self._freed = 0

    def watch(self):
        """From now on each collection is noted (gc.callbacks)."""
        gc.callbacks.append(self._note)

    @quietly
    def _note(self, when, told):
        if when == "start":
            self._level = self._gauge.tensors_now()
        elif told["collected"] and (freed := self._level - self._gauge.tensors_now()) > 0:
            self._freed += freed
            self._peak = self._gauge.tensors_peak()

    def step_begins(self):
        """What was collected before was not in use at this step's peak."""
        self._freed = 0

    def freed(self):
        """Bytes that were in use at the peak; 0 where the peak came after the collection."""
        return self._freed if self._peak == self._gauge.tensors_peak() else 0


class Censuses:
    """Takes a Census when it is asked, and keeps all of them. Sizes are bytes of the objects themselves."""

    def __init__(self, gauge, tf, made):
        self._gauge, self._tf, self._made = gauge, tf, made
        self.collections = Collections(gauge)
        self._finder = Finder(but=("datasets",))
        self._elements = weakref.WeakKeyDictionary()  # iterator: {stage: what one element takes}
        self._lines = weakref.WeakKeyDictionary()  # iterator: {stage: the line that made it}
        self._met = weakref.WeakSet()  # models
        self._number_met = 0
        self._endless = False  # see Buffer
        self._between = False  # whether the last one was
        self._last = None  # what the last search found, see _as_before
        self._settled = (0, 0)  # bytes of tensors, number of iterators after the last collection
        self.taken = []
        self.buffers = {}  # stage: Buffer, the most that was seen at once

    def note_iterator(self, iterator, dataset):
        """A pipeline's stages, while its data set is at hand."""
        self._elements[iterator] = _element_bytes(dataset)
        self._lines[iterator] = ask(self._made.stages, dataset, {})
        self._endless = self._endless or ask(_caches_behind_repeat, dataset, False)

    def take(self, step, frames=(), between=False, extra=False, collects=True):
        """Count after so many steps. frames: functions whose names count as holders, beside those that called this.

        extra: as in Census; nothing is collected then, or the doctor would cure what it looks for. Nor is it if not collects.
        between: from another thread, while a call of the script runs; the next one takes its place, and nothing is collected.
        Garbage is collected only where what is alive has grown, to tell what only waits for the collector: a script in
        which nothing grows is not changed in when its own finalizers run.
        """
        if self._between:
            self.taken.pop()
            self._between = False
        found = self._as_before()
        if found is None:
            found = self._found() if collects and not (between or extra) else self._finder.by_kind()
            self._remember(found)
        models = _with_variables_of_their_own(found["models"])
        self._meet([model for model, _ in models])
        weights = {key for model in found["models"] for key in ask(_trainable, model, ())}
        models = [Model(sendable(type(model).__name__), size) for model, size in models]
        slots = {key for optimizer in found["optimizers"] for key in ask(_slots, optimizer, ())}
        sizes, largest, float64 = Counter(), 0, 0
        for variable in {ask(_handle, variable, id(variable)): variable for variable in found["variables"]}.values():
            sizes[_group(variable, slots, weights, not models)] += variable_bytes(variable)
            largest = max(largest, variable_bytes(variable))
            float64 += variable_bytes(variable) * (ask(lambda variable: variable.dtype.name, variable) == "float64")
        tensors, arrays, of_models, containers = _holders([*frames, *own_frames(sys._getframe())])
        self.taken.append(
            Census(
                step=step,
                level=self._gauge.tensors_now(),
                weights=sizes["weights"],
                slots=sizes["slots"],
                other_variables=sizes["other variables"],
                held=self._last.held,
                replicas=sum(ask(_copies, variable, 0) for variable in found["distributed"]),
                tensors=self._last.tensors,
                arrays=sum(holder.size for holder in arrays),
                buffers=self._count_buffers(found["iterators"]),
                iterators=len(found["iterators"]),
                garbage=self.collections.freed(),
                models_met=self._number_met,
                operations=sum(ask(lambda graph: graph.version, graph, 0) for graph in found["graphs"]),
                models=models,
                tensor_holders=tensors[:_MOST_HOLDERS],
                array_holders=arrays[:_MOST_HOLDERS],
                model_holders=of_models,
                containers=containers,
                process=self._gauge.process_now(),
                largest=largest,
                float64=float64,
                extra=extra,
                peak=self._gauge.tensors_peak(),
            )
        )
        self._between = between

    def _as_before(self):
        """What the last search found by kind, but the tensors, if a new one would find the same; else None.

        That is so where each kind has as many objects as then, and the same. Tensors are others after each step, and the
        same in sum where the allocator's level is, and the process has not grown by some that share an array's memory.
        A search takes 50 ms, some 30 times the step of a small model.
        """
        last, level = self._last, self._gauge.tensors_now()
        if last is None or level is None or level != last.level or not self._finder.as_many():
            return None
        if (self._gauge.process_now() or 0) > last.process + _GROWN:
            return None
        found = {kind: [one() for one in ones] for kind, ones in last.things.items()}
        return None if any(one is None for ones in found.values() for one in ones) else found

    def _remember(self, found):
        things = {
            kind: [ask(weakref.ref, thing, _gone) for thing in found[kind]] for kind in found if kind != "tensors"
        }
        process = self._gauge.process_now() or 0
        self._last = _Search(self._gauge.tensors_now(), process, *_tensor_sums(found), things)

    def _found(self):
        """What is alive by kind, when garbage has been collected where there may be some."""
        found = self._finder.by_kind()
        before, iterators = sum(_tensor_sums(found)), len(found["iterators"])
        least = self._settled[0] + max(_GROWN, _GROWN_SHARE * self._settled[0])
        if before <= least and iterators <= self._settled[1] + 1:
            return found
        del found  # it would keep alive what is to be collected
        gc.collect()
        found = self._finder.by_kind()
        self._settled = sum(_tensor_sums(found)), len(found["iterators"])
        return found

    def _meet(self, models):
        """Count the models that have been alive at any census."""
        for model in models:
            if ask(lambda model: model not in self._met, model, False):
                self._met.add(model)
                self._number_met += 1

    def count_buffers(self):
        """Look at the buffers of the iterators that are known, while a call of the script takes long."""
        self._count_buffers(list(self._elements))

    def _count_buffers(self, iterators):
        """Bytes that all these iterators buffer now; the most of each stage is kept."""
        held, elements, lines = Counter(), Counter(), {}
        for iterator in iterators:
            for node, size, number in ask(self._buffered, iterator, ()):
                held[node] += size
                elements[node] += number
                lines[node] = _line_of(node, self._lines.get(iterator, {}))
        for node, size in held.items():
            if node not in self.buffers or size > self.buffers[node].size:
                cache = node.startswith(_CACHES)
                self.buffers[node] = Buffer(size, node, elements[node], cache, self._endless and cache, lines[node])
        return held.total()

    def _buffered(self, iterator):
        """[(stage, bytes, elements)] of what a running iterator buffers: tf.data's own model of its pipeline."""
        rows = []
        for node in self._tf.data.experimental.get_model_proto(iterator).nodes.values():
            size, number = node.buffered_bytes, node.buffered_elements
            if node.name.startswith("Cache"):
                size, number = node.bytes_produced, node.num_elements
            one = self._elements.get(iterator, {}).get(node.name.removesuffix("V2").removesuffix("V3"))
            if one is None or not number or size <= _A_SLICE * number * one:
                rows.append((node.name, max(size, number * one if one else 0), number))
        return rows


def _line_of(node, lines):
    """The line of a stage, by the name that tf.data's model has for it: "ParallelMapV2" is the stage ParallelMap, "MemoryCacheImpl" the stage Cache."""
    found = max((name for name in lines if name in node), key=len, default="")
    return lines.get(found, "")


def _element_bytes(dataset):
    """{stage: bytes of one element, as the allocator rounds them up} of a pipeline's stages, where their shapes are known."""
    found = {}
    while dataset is not None:
        size = ask(
            lambda data: [s.num_elements() * t.size for s, t in zip(data._flat_shapes, data._flat_types)], dataset
        )
        if size is not None:
            found[stage(dataset)] = sum(-(-one // _ROUNDED_TO) * _ROUNDED_TO for one in size)
        dataset = getattr(dataset, "_input_dataset", None)
    return found


def _caches_behind_repeat(dataset):
    """Whether a pipeline caches in memory what it has repeated without end."""
    cached = False
    while dataset is not None:
        name = type(dataset).__name__
        if cached and name.endswith("RepeatDataset") and int(dataset._count) < 0:
            return True
        cached = cached or name.startswith("CacheDataset")
        dataset = getattr(dataset, "_input_dataset", None)
    return False


def _tensor_sums(found):
    """Bytes of (eager tensors, variables behind handles)."""
    tensors = found["tensors"]
    return sum(map(tensor_bytes, tensors)), sum(size for _, size in filter(None, map(behind, tensors)))


def _gone():
    """In place of a reference to what allows none: it counts as another one."""


def _handle(variable):
    """What all objects of one variable share: assign() returns another object for it."""
    return id(variable.handle)


def _with_variables_of_their_own(models):
    """[(model, bytes of variables that none before it has)], the largest first, of those that have such: neither parts of others, nor what each add() to a Sequential leaves behind."""
    sizes = [(model, ask(_sizes, model, {})) for model in models]
    found, seen = [], set()
    for model, own in sorted(sizes, key=lambda one: -sum(one[1].values())):
        if size := sum(own[key] for key in own.keys() - seen):
            found.append((model, size))
            seen |= own.keys()
    return found


def _trainable(model):
    return [id(_plain(variable)) for variable in model.trainable_variables]


def _sizes(model):
    return {id(_plain(variable)): variable_bytes(_plain(variable)) for variable in model.variables}


def _slots(optimizer):
    return [id(_plain(variable)) for variable in optimizer.variables if not callable(variable)]


def _plain(variable):
    """The tf.Variable behind a Keras 3 variable, or the variable itself; of a distributed one the first copy (see _copies)."""
    variable = getattr(variable, "_value", variable)
    return variable.values[0] if hasattr(variable, "values") else variable


def _group(variable, slots, weights, no_models):
    """The kind of a variable. Where there are no models, what trains is a weight."""
    if id(variable) in slots:
        return "slots"
    trains = id(variable) in weights or (no_models and ask(lambda variable: variable.trainable, variable, False))
    return "weights" if trains else "other variables"


def _copies(variable):
    """Bytes of a distributed variable's copies beside the first."""
    return (len(variable.values) - 1) * variable_bytes(variable.values[0])


def _holders(frames):
    """([Holder] of tensors, of arrays, of models or variables, of other objects in containers): which names of the script hold them, largest first."""
    values = own_names(frames)
    held = by_name(values)
    found = []

    @cache  # to find a name's line its value is walked; one name may hold tensors, arrays and other objects
    def place(name, *kinds):
        return ask(lambda name: filled_at(name, values[name], *kinds), name, "")

    for kind in ("tensors", "arrays"):
        names = sorted((name for name in held if held[name][kind]), key=lambda name: -held[name][kind])
        places = [*map(place, names[:_MOST_PLACED])]
        places += [""] * (len(names) - len(places))
        found.append([_holder(name, held[name], kind, place) for name, place in zip(names, places)])
    most = sorted((name for name in held if held[name]["variables"]), key=lambda name: -held[name]["variables"])
    found.append(
        [
            Holder(sendable(name), held[name]["number of models"], held[name]["variables"], place(name))
            for name in most[:_MOST_PLACED]
        ]
    )
    full = sorted((name for name in held if held[name]["items"] > _FEW), key=lambda name: -held[name]["items"])
    items = [Holder(sendable(name), held[name]["items"], 0, place(name, ("items",))) for name in full[:_MOST_PLACED]]
    return *found, items


def _holder(name, count, kind, place):
    of_data_sets = count["data sets' tensors"] if kind == "tensors" else 0
    return Holder(
        sendable(name), count[f"number of {kind}"], count[kind], place, count[f"bounded {kind}"], of_data_sets
    )
