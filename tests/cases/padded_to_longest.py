"""Symptom: out of memory in the middle of an epoch, taken for a leak (tensorflow/nmt#208, stickeritis/sticker#55, backstopmedia/tensorflowbook#11).

Mechanism: a batch is padded to its longest member, and one rare line is very long.
Fix: cut the lines (or fill batches by words instead of lines).
"""

# kind: batch-bound activations
# budget: 64 MiB
# line: model.fit(batches, verbose=0)
import sys

import keras
import numpy as np
import tensorflow as tf

lengths = np.random.default_rng(0).lognormal(3.5, 0.5, 320).astype(int)
lengths[200] = 4000
lines = tf.data.Dataset.from_tensor_slices(lengths).map(lambda n: tf.ones([n], tf.int32))
if "--fixed" in sys.argv:
    lines = lines.map(lambda line: line[:200])
batches = lines.padded_batch(32).map(lambda line: (line, tf.ones([tf.shape(line)[0], 1])))
model = keras.Sequential(
    [
        keras.layers.Embedding(100, 64),
        keras.layers.Dense(64, "relu"),
        keras.layers.GlobalMaxPooling1D(),
        keras.layers.Dense(1),
    ]
)
model.compile("sgd", "mse")
model.fit(batches, verbose=0)
