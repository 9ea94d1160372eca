"""Symptom: a result that would fit fails at its very end, after all the work (CompOmics/DeepLC#125).

Mechanism: a list of parts is joined, and for a moment parts and whole are there together: twice the result.
Fix: allocate the result once and fill it, here on disk.
"""
# kind: retained tensors
# budget: 256 MiB
import sys
import tempfile

import keras
import numpy as np

x = np.random.default_rng(0).random((3200, 64), dtype="float32")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2048, "relu")])
parts = []
with tempfile.TemporaryFile() as file:
    if "--fixed" in sys.argv:
        whole = np.memmap(file, "float32", "w+", shape=(3200, 2048))
    for start in range(0, 3200, 100):
        part = model.predict_on_batch(x[start : start + 100])
        if "--fixed" in sys.argv:
            whole[start : start + 100] = part
        else:
            parts.append(part)
    if "--fixed" not in sys.argv:
        whole = np.concatenate(parts)
    print(whole.shape)
