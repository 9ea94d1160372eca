"""The checker of lab 19: which faults are left in a training script, found by measuring its functions.

It never looks at source text. Each function of the script runs on small inputs, in a process of its own, and exact
counters tell what it holds: TensorFlow's allocator, `tracemalloc` for NumPy, the tracing count of a `tf.function`.
A fault is a quantity that grows with something it should not grow with, so any cure of it counts.

The script's functions, by name (SCRIPT): image_dataset(files, labels) gives a data set of single images,
make_pipeline(images) batches for training, build_model() a Keras model, make_step(model, optimizer) a function of
(images, labels, rate), learning_rate(start, epoch) the rate to call it with, train_epoch(step, batches, rate, history)
one epoch, evaluate(model, images) the accuracy, search(rates, train, validation, epochs) a dictionary with an entry a
rate, and main(files, labels) runs it all and gives the best accuracy.
"""

import gc
import time
import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from labsupport.ground.budget import parse_size
from labsupport.showing.running import run

SCRIPT = (
    "image_dataset",
    "make_pipeline",
    "build_model",
    "make_step",
    "learning_rate",
    "train_epoch",
    "evaluate",
    "search",
    "main",
)
# name: (lab, what is measured, the most that is allowed). Where a fault is there, theory gives the number in brackets.
FAULTS = {
    "eager stack": ("01", "images held by a new data set, for each image", 0.5),  # [1: the stack]
    "float64": ("02", "bytes of one number in a training batch", 4),  # [8]
    "decoded buffer": ("03", "images held by a running pipeline, for each image", 0.5),  # [1]
    "giant batch": ("04", "peak of evaluate() on 256 images, over that on 64", 2),  # [4]
    "history": ("07", "growth for each step, in sizes of the weights", 0.5),  # [1: the gradients]
    "retracing": ("08", "new graphs for each epoch after the first", 0.5),  # [1: a trace for every new rate]
    "model per trial": ("09", "growth for each trial, in sizes of the weights", 1.5),  # [3: weights and Adam's state]
}
# How much lower the accuracy may be: three standard errors of a difference, with 160 images and an accuracy near 0.7.
LEARNS = 0.15


def script_functions(namespace):
    """The script's functions out of a namespace such as globals(); a KeyError names one that is missing."""
    return {name: namespace[name] for name in SCRIPT}


class _Held:
    """What this process holds, in bytes: tensors by TensorFlow's allocators, arrays by tracemalloc while it is on."""

    def __init__(self, tf):
        self._statistics = tf.config.experimental
        self._devices = ["CPU:0"] + (["GPU:0"] if tf.config.list_logical_devices("GPU") else [])
        self._numpy_only = [tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)]

    def _tensors(self, which):
        return sum(self._statistics.get_memory_info(device)[which] for device in self._devices)

    def now(self):
        """Bytes in use, once the threads of finished pipelines have let go of theirs."""
        gc.collect()
        levels = [None, self._tensors("current")]
        while levels[-1] != levels[-2] and len(levels) < 20:
            time.sleep(0.05)
            levels.append(self._tensors("current"))
        arrays = tracemalloc.take_snapshot().filter_traces(self._numpy_only).traces if tracemalloc.is_tracing() else []
        return levels[-1] + sum(trace.size for trace in arrays)

    def peak_of(self, work):
        """By how much tensors rise while work() runs."""
        before = self._tensors("current")
        for device in self._devices:
            self._statistics.reset_memory_stats(device)
        work()
        return self._tensors("peak") - before


def measure(script, files, labels):
    """Inside an arm: {fault: measured} for the functions of a script. Needs 128 files."""
    import tensorflow as tf

    held = _Held(tf)
    files, labels = list(files[:128]), np.asarray(labels[:128])

    # What a data set of files holds before anybody asks it for an image.
    tracemalloc.start()
    before = held.now()
    train = script["image_dataset"](files, labels)
    loaded = held.now() - before
    tracemalloc.stop()
    shape, dtype = train.element_spec[0].shape, train.element_spec[0].dtype
    one_image = shape.num_elements() * dtype.size

    def synthetic(number):
        """Images made on the fly, so that whatever is held is held by the pipeline behind them."""

        def image(i):
            return tf.fill(shape, tf.cast(i % 7, dtype)), tf.cast(i % 16, labels.dtype)

        return tf.data.Dataset.range(number).map(image).take(number)  # take() keeps tf.data from merging map and batch

    return {
        "eager stack": loaded / len(files) / one_image,
        "float64": next(iter(script["make_pipeline"](train)))[0].dtype.size,
        "decoded buffer": _buffered(script, train, synthetic, held) / one_image,
        "giant batch": _evaluation(script, synthetic, held),
        **_epochs(script, train, held),
        "model per trial": _trials(script, train, held),
    }


def _buffered(script, train, synthetic, held):
    """Bytes for each image that a running pipeline holds; then the same of the data set of files itself."""

    def growth(dataset_of, few, many):
        few_bytes, many_bytes = (
            held.peak_of(lambda number=number: sum(1 for _ in dataset_of(number))) for number in (few, many)
        )
        return (many_bytes - few_bytes) / (many - few)

    return max(growth(lambda n: script["make_pipeline"](synthetic(n)), 96, 384), growth(train.take, 32, 128))


def _evaluation(script, synthetic, held):
    """Peak of evaluate() on 256 images over that on 64."""
    model = script["build_model"]()
    script["evaluate"](model, synthetic(8))
    few, many = (
        held.peak_of(lambda number=number: script["evaluate"](model, synthetic(number))) for number in (64, 256)
    )
    return many / few


def _weights(model):
    return 4 * model.count_params()


def _epochs(script, train, held):
    """What the second and third epoch leave, for each step, and the graphs that they add; the first one warms up."""
    import keras

    model = script["build_model"]()
    step, history = script["make_step"](model, keras.optimizers.Adam()), []
    batches = script["make_pipeline"](train)
    steps, levels, traces = sum(1 for _ in batches), [], []
    for epoch in range(3):
        script["train_epoch"](step, batches, script["learning_rate"](0.001, epoch), history)
        if epoch == 0:
            tracemalloc.start()
        levels.append(held.now())
        traces.append(getattr(step, "experimental_get_tracing_count", lambda: 0)())
    tracemalloc.stop()
    return {
        "history": (levels[2] - levels[0]) / 2 / steps / _weights(model),
        "retracing": (traces[2] - traces[0]) / 2,
    }


def _trials(script, train, held):
    """What four trials leave beyond what one leaves, for each of the three, in sizes of the weights."""
    left = []
    for rates in ((0.001,), (0.001, 0.002, 0.003, 0.004)):
        before = held.now()
        results = script["search"](rates, train.take(16), train.take(16), 1)
        if set(results) != set(rates):
            raise AssertionError(f"search({rates}) gave results for {sorted(results)}: it must try every rate")
        del results
        left.append(held.now() - before)
    return (left[1] - left[0]) / 3 / _weights(script["build_model"]())


@dataclass
class Report:
    """What the checker found.

    measured: {fault: figure}; empty if the functions could not be measured, and `problem` says why.
    runs: {budget: ArmResult} of the whole script, from the largest budget on. least: the accuracy it must reach.
    """

    budgets: dict
    least: float
    runs: dict
    measured: dict = field(default_factory=dict)
    problem: str = ""

    @property
    def faults(self):
        """Names of the faults that are left, in the order of FAULTS."""
        return [name for name, (_, _, limit) in FAULTS.items() if name in self.measured and self.measured[name] > limit]

    @property
    def best(self):
        """The run under the smallest budget that sufficed; the one that died if none did."""
        return ([result for result in self.runs.values() if result.ok] or list(self.runs.values()))[-1]

    def missing(self, level, forgive_faults=False):
        """What a level still asks for, in words; "" if it is passed."""
        allowed, best = parse_size(self.budgets[level]), self.best
        if not best.ok:
            why = [best.error.message]
        elif best.budget > allowed:
            why = [f"its peak of {best.peak_mib:.0f} MiB does not fit into {self.budgets[level]}"]
        elif not best.value or best.value < self.least:
            why = [f"it learns less than before: accuracy {best.value}, where at least {self.least:.2f} is asked for"]
        else:
            why = []
        if self.problem:
            why.append(f"the functions could not be measured: {self.problem}")
        elif self.faults and (why or not forgive_faults):
            why.append("left: " + ", ".join(f"{name} (lab {FAULTS[name][0]})" for name in self.faults))
        return "; ".join(why)

    @property
    def frame(self):
        """A row a fault."""
        rows = [
            {
                "fault": name,
                "lab": lab,
                "what is measured": what,
                "measured": self.measured.get(name),
                "at most": limit,
                "": "LEFT" if name in self.faults else "",
            }
            for name, (lab, what, limit) in FAULTS.items()
        ]
        return pd.DataFrame(rows).set_index("fault").round(2)


def check_script(script, files, labels, budgets, accuracy):
    """Measure a script's functions, then run it under budgets = {level: size}, from the largest on; a Report.

    A run that finishes shows its exact peak, so the next one is under the smallest budget that this peak fits into.
    accuracy: what the script reached before; it may lose LEARNS.
    """
    functions_run = run(measure, script, files, labels, label="the checker measures your functions", quiet=True)
    sizes = sorted(set(budgets.values()), key=parse_size, reverse=True)
    first = run(script["main"], files, labels, budget=sizes[0], label=f"your script, {sizes[0]}")
    runs = {sizes[0]: first}
    fitting = [size for size in sizes[1:] if first.ok and first.figures["peak"] <= parse_size(size)]
    if fitting:
        runs[fitting[-1]] = run(script["main"], files, labels, budget=fitting[-1], label=f"your script, {fitting[-1]}")
    return Report(
        budgets,
        accuracy - LEARNS,
        runs,
        functions_run.value or {},
        "" if functions_run.ok else str(functions_run.error),
    )
