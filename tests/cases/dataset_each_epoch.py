"""Symptom: memory rises by the data set's size in each epoch (tensorflow/tensorflow#32052).

Mechanism: the dataset is built anew from the arrays in each epoch, and something, here a list of the epochs, keeps the old ones.
Fix: build it once.
"""

# kind: retained tensors
# budget: 256 MiB
# line: epochs.append((epoch, data, history.history["loss"]))
import sys

import keras
import numpy as np
import tensorflow as tf

x, y = np.random.rand(400, 2048).astype("float32"), np.random.rand(400, 1).astype("float32")
model = keras.Sequential([keras.Input((2048,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


def dataset():
    return tf.data.Dataset.from_tensor_slices((x, y)).map(lambda a, b: (a / 2, b), num_parallel_calls=2).batch(50)


data = dataset()
epochs = []
for epoch in range(12):
    if "--fixed" not in sys.argv:
        data = dataset()
    history = model.fit(data, verbose=0)
    epochs.append((epoch, data, history.history["loss"]))
