"""Remedies that can be tried on a script from outside: what each changes in TensorFlow or Keras, and for which kinds of trouble.

A trial runs the whole script again, while one of TensorFlow's or Keras' entry points takes another argument than it is
given. It shows what the change would save; whether the training is still as good is for the person to judge.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from labsupport.doctor.wrapping import wrap


@dataclass(frozen=True)
class Remedy:
    """words: the change. kinds: of suspects.LABS, which it is for. apply(): called behind the import of a library, "tensorflow" or "keras"."""

    words: str
    kinds: tuple
    library: str
    apply: Callable


def _dataset():
    from tensorflow.python.data.ops.dataset_ops import DatasetV2

    return DatasetV2


def _half(size):
    """Half of a batch; what is no plain number is left as it is."""
    return max(1, size // 2) if isinstance(size, int) else size


def _half_a_batch():
    for name in ("batch", "padded_batch"):
        wrap(
            _dataset(),
            name,
            lambda batch, data, batch_size, *args, **more: batch(data, _half(batch_size), *args, **more),
        )


def _half_a_batch_of_arrays():
    """fit() on arrays; a data set has been batched by itself."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    def instead(init, adapter, *args, batch_size=None, **more):
        init(adapter, *args, batch_size=batch_size, **more)
        init(adapter, *args, batch_size=_half(adapter._batch_size), **more)  # where none is given Keras chooses one

    wrap(ArrayDataAdapter, "__init__", instead)
    _half_a_batch()


def _half_a_batch_accumulated():
    """The updates stay as they are."""

    def accumulating(optimizer):
        optimizer.gradient_accumulation_steps = 2 * (optimizer.gradient_accumulation_steps or 1)
        return optimizer

    _optimizers_of_compile(accumulating)
    _half_a_batch_of_arrays()


def _optimizers_of_compile(instead):
    """compile() takes instead(optimizer) from now on."""
    import keras

    def changed(compile_, model, optimizer="rmsprop", *args, **more):
        return compile_(model, instead(keras.optimizers.get(optimizer)), *args, **more)

    wrap(keras.Model, "compile", changed)


def _recomputed_segments():
    """A Sequential of layers without a state of their own, in as many segments as one has layers; lab 12 says why."""
    import keras

    def chain(layers):
        return lambda x: functools.reduce(lambda x, layer: layer(x), layers, x)

    def instead(call, model, inputs, training=None, mask=None):
        if not training or mask is not None or not model.built or model.non_trainable_variables:
            return call(model, inputs, training=training, mask=mask)
        length = math.isqrt(len(model.layers))
        for start in range(0, len(model.layers), length):
            inputs = keras.remat(chain(model.layers[start : start + length]))(inputs)
        return inputs

    wrap(keras.Sequential, "call", instead)


def _prefetch_one():
    wrap(_dataset(), "prefetch", lambda prefetch, data, buffer_size, *args, **more: prefetch(data, 1, *args, **more))


def _shuffle_an_eighth():
    def instead(shuffle, data, buffer_size, *args, **more):
        return shuffle(data, max(1, buffer_size // 8) if isinstance(buffer_size, int) else buffer_size, *args, **more)

    wrap(_dataset(), "shuffle", instead)


_ROWS = 256  # that are looked at together: little beside the array


def _as_bytes(array):
    """(the array as uint8, by what to divide it again), where that changes no number in it; else (array, None)."""
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not array.ndim:
        return array, None
    for scale in (1, 255):
        packed = np.empty(array.shape, np.uint8)
        for start in range(0, len(array), _ROWS):
            rows, bytes_ = array[start : start + _ROWS], packed[start : start + _ROWS]
            if not np.isfinite(rows).all() or rows.min(initial=0) < 0 or rows.max(initial=0) * scale > 255:
                break
            np.rint(rows * scale, out=bytes_, casting="unsafe")
            if not np.array_equal(bytes_.astype(array.dtype) / array.dtype.type(scale), rows):
                break
        else:
            return packed, scale
    return array, None


def _packed(tree):
    """(arrays as bytes where that is possible, what makes the numbers of before from tensors of those)."""
    import tensorflow as tf

    flat = tf.nest.flatten(tree)
    arrays, scales = zip(*map(_as_bytes, flat))
    dtypes = [getattr(array, "dtype", None) for array in flat]

    def back(packed):
        parts = zip(tf.nest.flatten(packed), dtypes, scales)
        numbers = [part if scale is None else tf.cast(part, dtype) / scale for part, dtype, scale in parts]
        return tf.nest.pack_sequence_as(packed, numbers)

    return tf.nest.pack_sequence_as(tree, arrays), back


def _bytes_in_slices():
    def instead(slices, tensors, *args, **more):
        packed, back = _packed(tensors)
        return slices(packed, *args, **more).map(lambda *parts: back(parts if isinstance(tensors, tuple) else parts[0]))

    wrap(_dataset(), "from_tensor_slices", instead)


def _bytes_of_arrays():
    """Inputs of fit() and of from_tensor_slices()."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    def made(init, adapter, x, *args, **more):
        packed, adapter.way_back = _packed(x)
        init(adapter, packed, *args, **more)

    def read(dataset, adapter):
        back = adapter.way_back
        return dataset(adapter).map(lambda x, *others: (back(x), *others))

    wrap(ArrayDataAdapter, "__init__", made)
    wrap(ArrayDataAdapter, "get_tf_dataset", read)
    _bytes_in_slices()


def _no_cache():
    """Without the caches in memory; those in a file stay."""
    wrap(
        _dataset(), "cache", lambda cache, data, filename="", *args, **more: cache(data, filename) if filename else data
    )


def _adafactor():
    import keras

    _optimizers_of_compile(
        lambda optimizer: keras.optimizers.Adafactor(float(getattr(optimizer, "learning_rate", 0.001)))
    )


def _mixed_precision():
    import keras

    keras.config.set_dtype_policy("mixed_bfloat16")


_BUFFER, _ACTIVATIONS = ("buffer",), ("batch-bound activations",)
REMEDIES = {
    "batch": Remedy("half the batch", _ACTIVATIONS, "keras", _half_a_batch_of_arrays),
    "accumulation": Remedy("half the batch, two for an update", _ACTIVATIONS, "keras", _half_a_batch_accumulated),
    "recomputation": Remedy("keras.remat around segments of a Sequential", _ACTIVATIONS, "keras", _recomputed_segments),
    "precision": Remedy("mixed_bfloat16 as Keras' policy", _ACTIVATIONS, "keras", _mixed_precision),
    "prefetch": Remedy("prefetch(1)", _BUFFER, "tensorflow", _prefetch_one),
    "shuffle": Remedy("an eighth of the buffer in shuffle()", _BUFFER, "tensorflow", _shuffle_an_eighth),
    "cache": Remedy("no cache() in memory", (*_BUFFER, "cache behind repeat()"), "tensorflow", _no_cache),
    "uint8": Remedy(
        "data of whole numbers up to 255 as uint8, cast in the pipeline", ("input copy",), "keras", _bytes_of_arrays
    ),
    "optimizer": Remedy("Adafactor in compile()", ("optimizer state",), "keras", _adafactor),
}


def remedies(kinds):
    """Names in REMEDIES of what can be tried for kinds of trouble, those for the first kind first."""
    return [name for kind in kinds for name, remedy in REMEDIES.items() if kind in remedy.kinds]
