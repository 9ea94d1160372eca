"""Symptom: the process grows by as much each epoch, and TensorFlow's own counter stays where it is.

Mechanism: a record of each step is kept as Python floats, of which one weighs as much as eight of an array.
Fix: keep the mean.
"""

# kind: growth outside TensorFlow
# budget: 64 MiB
# line: log.append(sum(row) if "--fixed" in sys.argv else row)
# outside: 4 GiB
import sys

import keras
import numpy as np

x, y = np.random.rand(32, 8).astype("float32"), np.random.rand(32, 1).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
log = []
for step in range(130):
    model.train_on_batch(x, y)
    row = [float(value) for value in np.random.rand(40_000)]
    log.append(sum(row) if "--fixed" in sys.argv else row)
print(len(log), "steps")
