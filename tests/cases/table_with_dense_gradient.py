"""Symptom: a model of one large embedding dies in its first step, whatever the batch.

Mechanism: the table, and as much again for each of Adam's two slots, for each row whether it is used or not.
Fix: a smaller table (here hashed to fewer rows), or an optimizer without slots.
"""

# kind: optimizer state
# outside: 4 GiB
# budget: 256 MiB
# line: model.compile("adam", "mse")
import sys

import keras
import numpy as np

rows = 30_000 if "--fixed" in sys.argv else 300_000
words = np.random.default_rng(0).integers(0, rows, (640, 20))
layers = [keras.layers.Embedding(rows, 64), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
model = keras.Sequential(layers)
model.compile("adam", "mse")
model.fit(words, np.ones((640, 1)), batch_size=8, verbose=0)
