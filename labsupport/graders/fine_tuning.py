"""Graders of the lab on fine-tuning."""

import gc
import os
import tempfile
import tracemalloc

import numpy as np

from labsupport.ground.budget import MIB
from labsupport.ground.meter import phase, reading
from labsupport.lesson.exercises import exercise, try_out, untouched

_ROWS, _WIDTH, _RANK = 16384, 128, 4
_TABLE = _ROWS * _WIDTH * 4 / MIB


def _looked_up(answer):
    """In the arm: (how far rows and the gradients of a and b are off, in parts of those wanted), or a word."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    table, a, b = (
        tf.Variable(random.standard_normal(shape), dtype=tf.float32)
        for shape in ((_ROWS, _WIDTH), (_ROWS, _RANK), (_RANK, _WIDTH))
    )
    worst = 0.0
    for shape in ((4, 64), (300,)):
        ids = random.integers(0, _ROWS, shape)
        up = random.standard_normal((*shape, _WIDTH)).astype("float32")
        with phase("look up"), tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([a, b])
            rows = answer(table, a, b, tf.constant(ids))
            if untouched(rows):
                return "the function returns nothing yet: return the rows."
            if tuple(np.shape(rows)) != (*shape, _WIDTH):
                return f"for ids of the shape {shape} there are rows of the shape {tuple(np.shape(rows))}."
            if not tf.is_tensor(rows):
                return "the rows are no tensor, so a and b cannot be trained."
            loss = tf.reduce_sum(rows * up)
        with phase("way back"):
            given = tape.gradient(loss, [a, b])
        if None in given:
            return "a or b gets no gradient: they cannot be trained."
        picked, flat = a.numpy()[ids], up.reshape(-1, _WIDTH)
        to_a = np.zeros(a.shape, "float32")
        np.add.at(to_a, ids.reshape(-1), flat @ b.numpy().T)
        wanted = [table.numpy()[ids] + picked @ b.numpy(), to_a, picked.reshape(-1, _RANK).T @ flat]
        for found, right in zip([rows, *map(tf.convert_to_tensor, given)], wanted):
            worst = max(worst, float(np.abs(found - right).max() / np.abs(right).max()))
    return worst


@exercise(
    1,
    "A row of table + A·B is a row of the table, and a row of A times B.",
    "tf.gather(table, ids) gives rows; tf.tensordot(x, b, 1) multiplies the last axis of x by b.",
)
def look_up(answer):
    """answer(table, a, b, ids) gives rows of table + a @ b and makes nothing as large as the table."""
    done = try_out(_looked_up, answer, label="your answer to 1")
    assert done.value < 1e-3, "rows, or the gradients of a and b, are others than those of table + a @ b."
    most = max(part.rise_mib for part in done.phases)
    assert most < 0.5 * _TABLE, (
        f"it took {most:.1f} MiB to look up a few rows and go back: something is as large as the table, {_TABLE:.0f} MiB."
    )


_UNITS, _LAYERS = 512, 6
_WEIGHTS = _LAYERS * _UNITS**2 * 4 / MIB


def _trained(answer, losses):
    """In the arm: (are the weights in the end those of the best epoch, most MiB that the callback took), or a word."""
    import keras

    path = os.path.join(tempfile.mkdtemp(), "best.weights.h5")
    model = keras.Sequential([keras.Input((_UNITS,)), *[keras.layers.Dense(_UNITS) for _ in range(_LAYERS)]])
    model.compile("sgd", "mse", run_eagerly=True)  # a few steps: to trace them would take longest
    callback = answer(path)
    if untouched(callback):
        return "the function returns nothing yet: return a callback."
    if not isinstance(callback, keras.callbacks.Callback):
        return f"the function returns {type(callback).__name__}, not a callback."
    x = np.random.default_rng(0).random((8, _UNITS), np.float32)
    model.train_on_batch(x, x)
    callbacks, seen, most = keras.callbacks.CallbackList([callback], model=model), [], 0.0
    gc.collect()
    tracemalloc.start()
    level, tensors = tracemalloc.get_traced_memory()[0], reading().tensors_mib

    def told(event, *arguments):
        """Call the callback, and add up what it took: at most in Python and NumPy, afterwards in tensors."""
        nonlocal most
        tracemalloc.reset_peak()
        getattr(callbacks, event)(*arguments)
        taken = (tracemalloc.get_traced_memory()[1] - level) / MIB
        most = max(most, taken + reading().tensors_mib - tensors)

    told("on_train_begin")
    for epoch, loss in enumerate(losses):
        model.train_on_batch(x, x)
        seen.append(_marks(model))
        told("on_epoch_begin", epoch)
        told("on_epoch_end", epoch, {"loss": 1 / (1 + epoch), "val_loss": loss})
        if _marks(model) != seen[-1]:
            return "the weights change at the end of an epoch: training would go on from others."
    told("on_train_end")
    tracemalloc.stop()
    return _marks(model) == seen[int(np.argmin(losses))], most


def _marks(model):
    """What tells the model's weights from others."""
    return [hash(weight.numpy().tobytes()) for weight in model.weights]


def _two_trainings(answer):
    first = _trained(answer, [3.0, 1.0, 2.0, 4.0])
    second = first if isinstance(first, str) else _trained(answer, [2.0, 3.0, 1.0])
    return second if isinstance(second, str) else (first[0] and second[0], max(first[1], second[1]))


@exercise(
    2,
    "What need not be in memory can be in a file. Which of Keras' callbacks writes one when a loss is the lowest so far?",
    "keras.callbacks.ModelCheckpoint(path, 'val_loss', save_best_only=True, save_weights_only=True) writes, and nobody reads: "
    "a class that inherits from it may have on_train_end(self, logs=None), and self.model.load_weights.",
)
def best(answer):
    """answer(path) gives a callback that ends with the best epoch's weights and copies one layer at a time."""
    done = try_out(_two_trainings, answer, label="your answer to 2")
    right, most = done.value
    assert right, "the weights in the end are not those of the epoch with the lowest val_loss."
    assert most < 0.6 * _WEIGHTS, (
        f"the callback took {most:.1f} MiB, and the weights have {_WEIGHTS:.0f}: there are copies of the weights in memory."
    )
