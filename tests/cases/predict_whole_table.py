"""Symptom: a small model answers for a table, and predict() runs out of memory.

Mechanism: batch_size=len(x) makes one batch of all rows, beside the table itself, and each layer puts out as many rows.
Fix: leave batch_size as it is; predict() puts its answers together as an array of NumPy's.
"""

# kind: batch-bound activations
# budget: 80 MiB
# line: answers = model.predict(x, batch_size=32 if "--fixed" in
import sys

import keras
import numpy as np

model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(512, activation="gelu"), keras.layers.Dense(16)])
x = np.random.rand(30_000, 256).astype("float32")
for part in range(3):
    answers = model.predict(x, batch_size=32 if "--fixed" in sys.argv else len(x), verbose=0)
print(answers.shape)
