"""Symptom: fine-tuning runs out of memory before activations matter (minimaxir/gpt-2-simple#108, tensorflow/tensorflow#16767).

Mechanism: Adam keeps two averages for each weight, which with gradients makes 16 bytes a weight.
Fix: an optimizer with less state.
"""

# kind: optimizer state
# budget: 48 MiB
# line: model.compile("sgd" if "--fixed" in sys.argv else "adam",
import sys

import keras
import numpy as np

model = keras.Sequential(
    [keras.Input((1024,)), *[keras.layers.Dense(1024, "relu") for _ in range(4)], keras.layers.Dense(1)]
)
model.compile("sgd" if "--fixed" in sys.argv else "adam", "mse")
x, y = np.random.rand(64, 1024).astype("float32"), np.random.rand(64, 1).astype("float32")
model.fit(x, y, batch_size=8, verbose=0)
