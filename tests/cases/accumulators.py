"""Symptom: with gradient accumulation less fits than without (bojone/bert4keras#477).

Mechanism: the accumulators are one more set as large as the weights; where weights dominate, a smaller batch saves less than that.
Fix: leave it off where weights dominate.
"""

# kind: optimizer state
# budget: 50 MiB
# line: model.compile(keras.optimizers.SGD(momentum=0.9,
import sys

import keras
import numpy as np

model = keras.Sequential(
    [keras.Input((1024,)), *[keras.layers.Dense(1024, "relu") for _ in range(3)], keras.layers.Dense(1)]
)
steps = None if "--fixed" in sys.argv else 4
model.compile(keras.optimizers.SGD(momentum=0.9, gradient_accumulation_steps=steps), "mse")
x, y = np.random.rand(64, 1024).astype("float32"), np.random.rand(64, 1).astype("float32")
for epoch in range(2):
    model.fit(x, y, batch_size=32 if steps is None else 8, verbose=0)
