"""Symptom: more validation items are made than validation_steps asks for, and they build up (tensorflow/tensorflow#35982).

Mechanism: fit() reads ahead; a generator that notes every item it gave keeps the surplus and the rest for good.
Fix: a generator without a memory of its items.
"""

# kind: retained tensors
# budget: 256 MiB
# line: given.append(x)
import sys

import keras
import numpy as np

random = np.random.default_rng(0)
given = []


def batches(keep):
    while True:
        x = random.random((32, 4096), dtype="float32")
        if keep:
            given.append(x)
        yield x, x[:, :1]


model = keras.Sequential([keras.Input((4096,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
validation = batches(keep="--fixed" not in sys.argv)
model.fit(batches(False), steps_per_epoch=10, epochs=6, validation_data=validation, validation_steps=5, verbose=0)
