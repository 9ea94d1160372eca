"""Symptom: training stops in the middle at a softmax that is far too large (tensorflow/tensor2tensor#545, espnet/espnet#292).

Mechanism: attention has a score for each pair of positions, and the data hold one very long line.
Fix: cut lines to a length that fits before training.
"""

# kind: batch-bound activations
# budget: 96 MiB
# line: model.train_on_batch(batch, np.ones((4, 1)))
import sys

import keras
import numpy as np

words = keras.Input((None,), dtype="int32")
hidden = keras.layers.Embedding(500, 32)(words)
hidden = keras.layers.MultiHeadAttention(4, 8)(hidden, hidden)
model = keras.Model(words, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden)))
model.compile("sgd", "mse")
random = np.random.default_rng(0)
for length in [60, 128, 90, 256, 100, 1400, 80, 120]:
    length = min(length, 256) if "--fixed" in sys.argv else length
    batch = random.integers(0, 500, (4, length))
    model.train_on_batch(batch, np.ones((4, 1)))
