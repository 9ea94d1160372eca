"""Symptom: a classifier of long reviews runs out of memory though it has few weights (backstopmedia/tensorflowbook#11, OpenNMT/OpenNMT-tf#720).

Mechanism: backpropagation through time keeps gates and states of every step, and all reviews are padded to the longest.
Fix: cut to the length that matters (or train in pieces that hand on their state).
"""
# kind: batch-bound activations
# budget: 64 MiB
import sys

import keras
import numpy as np

reviews = np.random.default_rng(0).random((64, 1000, 32), dtype="float32")
if "--fixed" in sys.argv:
    reviews = reviews[:, :100]
model = keras.Sequential([keras.layers.LSTM(128), keras.layers.Dense(1)])
model.compile("sgd", "mse")
for start in range(0, 64, 32):
    model.train_on_batch(reviews[start : start + 32], np.ones((32, 1)))
