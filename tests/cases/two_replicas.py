"""Symptom: a model that just fits one device runs out of memory on two (tensorflow/tensorflow#22088).

Mechanism: MirroredStrategy holds all variables and optimizer slots once on each device; it does not divide them.
Fix: one device, or a model that is divided.
"""

# kind: replicas
# budget: 64 MiB
# line: model = keras.Sequential(
# devices: 2
import sys

import keras
import numpy as np
import tensorflow as tf

devices = ["CPU:0"] if "--fixed" in sys.argv else ["CPU:0", "CPU:1"]
strategy = tf.distribute.MirroredStrategy(devices)
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((1024,)), *[keras.layers.Dense(1024, "relu") for _ in range(2)], keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
x, y = np.random.rand(64, 1024).astype("float32"), np.random.rand(64, 1).astype("float32")
model.fit(x, y, batch_size=16, verbose=0)
