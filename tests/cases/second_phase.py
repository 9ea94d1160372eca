"""Symptom: out of memory exactly when the second phase of training begins (qqwweee/keras-yolo3#199).

Mechanism: all layers are unfrozen, which adds gradients and optimizer slots for all weights.
Fix: keep most of the backbone frozen (or a leaner optimizer).
"""
# kind: optimizer state
# budget: 56 MiB
import sys

import keras
import numpy as np

backbone = keras.Sequential([keras.Input((1024,)), *[keras.layers.Dense(1024, "relu") for _ in range(4)]])
model = keras.Sequential([backbone, keras.layers.Dense(1)])
x, y = np.random.rand(64, 1024).astype("float32"), np.random.rand(64, 1).astype("float32")
for phase in (1, 2):
    for layer in backbone.layers:
        layer.trainable = phase == 2 and ("--fixed" not in sys.argv or layer is backbone.layers[-1])
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=8, verbose=0)
