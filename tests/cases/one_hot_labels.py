"""Symptom: turning labels into one-hot vectors exceeds memory (a tutorial on to_categorical at w3toppers.com, and a question on Stack Overflow).

Mechanism: a label of 4 bytes becomes one number for each word of the vocabulary.
Fix: integer labels with the sparse loss, which gives the same numbers.
"""

# kind: input copy
# budget: 40 MiB
# line: model.fit(words, labels, batch_size=4, verbose=0)
import sys

import keras
import numpy as np

words = np.random.default_rng(0).integers(0, 5000, (128, 20))
model = keras.Sequential([keras.layers.Embedding(5000, 8), keras.layers.Dense(5000)])
if "--fixed" in sys.argv:
    labels, loss = words, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
else:
    labels, loss = keras.utils.to_categorical(words, 5000), keras.losses.CategoricalCrossentropy(from_logits=True)
model.compile("sgd", loss)
model.fit(words, labels, batch_size=4, verbose=0)
