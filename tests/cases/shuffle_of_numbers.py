"""Symptom: "Filling up shuffle buffer", then the process dies, though the data set is an array of a few megabytes.

Mechanism: each element of a buffer is a tensor of its own, and the allocator gives none less than 256 bytes: a number of
8 bytes takes 32 times its size.
Fix: shuffle batches or a permutation of indices in NumPy; or a smaller buffer.
"""

# kind: buffer
# budget: 64 MiB
# outside: 2 GiB
import sys

import keras
import numpy as np
import tensorflow as tf

numbers = np.arange(400_000)
buffer = 1_000 if "--fixed" in sys.argv else len(numbers)
data = tf.data.Dataset.from_tensor_slices(numbers).shuffle(buffer).batch(4096)
model = keras.Sequential([keras.layers.Embedding(10_000, 8), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(data.map(lambda i: (i % 10_000, tf.cast(i % 7, tf.float32))), verbose=0)
print("one epoch")
