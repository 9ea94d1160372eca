"""Symptom: embeddings are made batch by batch, and memory runs out when the loop is over.

Mechanism: the outputs of all batches are kept as tensors, and tf.concat() makes one tensor of them beside them.
Fix: an array of NumPy's for all of them, made beforehand, into which each output is copied.
"""

# kind: retained tensors
# budget: 48 MiB
# line: kept.append(found)
import sys

import keras
import numpy as np
import tensorflow as tf

model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(2048)])
x, kept = np.random.rand(4096, 64).astype("float32"), []
embeddings = np.empty((len(x), 2048), "float32")
embed = tf.function(lambda rows: model(rows, training=False))
for start in range(0, len(x), 128):
    found = embed(tf.constant(x[start : start + 128]))
    if "--fixed" in sys.argv:
        embeddings[start : start + 128] = found
    else:
        kept.append(found)
if kept:
    embeddings = tf.concat(kept, 0).numpy()
print(embeddings.shape)
