"""Symptom: slicing a large NumPy array into a dataset takes as much again, or more (tensorflow/tensorflow#50524, #38693, #52215).

Mechanism: from_tensor_slices copies the whole array into a tensor, which stays as long as the dataset.
Fix: a dataset of indices that fetches the rows of a batch when they are needed (or a memory-mapped file).
"""

# kind: input copy
# budget: 48 MiB
# line: dataset =
import sys

import keras
import numpy as np
import tensorflow as tf

x = np.random.default_rng(0).random((2000, 8192), dtype="float32")


def rows(numbers):
    return tf.ensure_shape(tf.numpy_function(lambda n: x[n], [numbers], tf.float32), [None, 8192])


if "--fixed" in sys.argv:
    dataset = tf.data.Dataset.range(2000).shuffle(2000).batch(50).map(rows)
else:
    dataset = tf.data.Dataset.from_tensor_slices(x).shuffle(2000).batch(50)
model = keras.Sequential([keras.Input((8192,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(dataset.map(lambda rows: (rows, tf.reduce_mean(rows, axis=1))), verbose=0)
