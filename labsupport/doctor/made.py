"""Where a script makes what holds memory: the lines of its models, optimizers, processes and stages of pipelines.

And where it asks for recomputation, which would spare some. Runs in the arm's process.
"""

import os
import sys
import threading
from collections import Counter
from weakref import WeakKeyDictionary

from labsupport.doctor.wrapping import quietly, wrap
from labsupport.ground.record import sendable

_MOST_NAMES = 4  # told of layers


def stage(dataset):
    """The name of a data set's last stage, such as "Shuffle"."""
    return type(dataset).__name__.strip("_").removesuffix("Dataset").removesuffix("V1")


class Made:
    """Lines as where() gives them while something is made, such as "train.py:41"; "" for what no line of the script made."""

    def __init__(self, where):
        self._where = where
        self._lines = {what: Counter() for what in ("model", "optimizer", "process", "recomputation", "clear_session")}
        self._wanted, self._called = {}, set()  # names that a RematScope lists, in their order; of layers called in one
        self.recomputed = 0  # calls of functions that recompute on the way back
        self.segments = 0  # the most of those in one graph, or in one step without a graph
        self._segments_of = WeakKeyDictionary()  # a graph, or this object for a step without one: their number
        self._stages = WeakKeyDictionary()  # tf.data.Dataset: line

    def watch_tensorflow(self):
        """Wrap what makes stages of pipelines, what recomputes and what starts processes, and note when this one forks."""
        from multiprocessing.process import BaseProcess

        import tensorflow as tf
        from tensorflow.python.data.ops.dataset_ops import DatasetV2
        from tensorflow.python.eager import context, record

        wrap(DatasetV2, "__init__", self._stage)
        wrap(BaseProcess, "start", self._process)
        wrap(tf, "recompute_grad", self._recompute)
        wrap(record, "stop_recording", self._not_recorded)
        wrap(context.Context, "clear_kernel_cache", self._cleared)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=lambda: self._note("process"))  # a library's thread may do it

    def watch_keras(self, keras):
        """Wrap what makes models and optimizers. Of a model __new__, since Keras reads the parameters of each __init__."""
        from keras.src.optimizers import base_optimizer

        wrap(keras.Model, "__new__", self._model)
        wrap(base_optimizer.BaseOptimizer, "__init__", self._optimizer)
        if hasattr(keras, "RematScope"):  # since Keras 3.9
            wrap(keras.RematScope, "__enter__", self._recompute)
            wrap(keras.Layer, "rematerialized_call", self._called_in_scope)

    def lines(self):
        """{what: the line that made most of its kind, of several the last}; "not layers": names, see Facts."""
        missed = [name for name in self._wanted if name not in self._called]
        found = {"not layers": ", ".join(missed[:_MOST_NAMES]) + ", …" * (len(missed) > _MOST_NAMES)}
        for what, lines in self._lines.items():
            most = max(lines.values(), default=0)
            found[what] = next((line for line in reversed(lines) if lines[line] == most), "")
        return found

    def stages(self, dataset):
        """{stage: line} of a data set and those that it reads; of stages of one name the last."""
        found, waiting = {}, [dataset]
        while waiting:
            dataset = waiting.pop()
            found.setdefault(stage(dataset), self._stages.get(dataset, ""))
            waiting += dataset._inputs()
        return found

    @quietly
    def _note(self, what):
        line = self._where() or self._where(sys._current_frames().get(threading.main_thread().ident))
        if line:
            count = self._lines[what].pop(line, 0)  # put in last
            self._lines[what][line] = count + 1

    def _model(self, original, cls, *args, **kwargs):
        self._note("model")
        return original(cls, *args, **kwargs)

    def _process(self, original, process):
        self._note("process")
        original(process)

    def _optimizer(self, original, optimizer, *args, **kwargs):
        self._note("optimizer")
        original(optimizer, *args, **kwargs)

    def _recompute(self, original, wanted):
        self._note("recomputation")
        self._note_names(wanted)
        return original(wanted)

    @quietly
    def _note_names(self, scope):
        """scope: a RematScope, or what tf.recompute_grad is given."""
        if getattr(scope, "mode", "") == "list_of_layers":
            self._wanted.update(dict.fromkeys(map(sendable, scope.layer_names)))

    def _called_in_scope(self, original, layer, *args, **kwargs):
        self._called.add(layer.name)
        return original(layer, *args, **kwargs)

    def _not_recorded(self, original):
        # Frames: wrap()'s, then who calls: tf.recompute_grad's inner function, among few others.
        caller = sys._getframe(2).f_code
        if caller.co_name == "inner" and caller.co_filename.endswith("custom_gradient.py"):
            self.recomputed += 1
            self._count_segment()
        return original()

    @quietly
    def _count_segment(self):
        tf = sys.modules["tensorflow"]
        key = self if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        number = self._segments_of[key] = self._segments_of.get(key, 0) + 1
        self.segments = max(self.segments, number)

    def step_begins(self):
        """What recomputes without a graph is counted anew."""
        self._segments_of.pop(self, None)

    def _cleared(self, original, context):
        if sys._getframe(2).f_code.co_name == "clear_session":  # frames: wrap()'s, then Keras'
            self._note("clear_session")
        return original(context)

    def _stage(self, original, dataset, *args, **kwargs):
        original(dataset, *args, **kwargs)
        self._note_stage(dataset)

    @quietly
    def _note_stage(self, dataset):
        self._stages[dataset] = self._where()
