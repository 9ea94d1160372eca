"""Symptom: saving a model with pretrained word vectors takes many times the table's size, or fails (tensorflow/tensorflow#45041, keras-team/keras#18605, #10718).

Mechanism: embeddings_initializer=Constant(matrix) makes the matrix part of the model's configuration. To save it, each
number becomes a Python object in nested lists and then text, beside the weights, which are saved as well.
Fix: make the table with any initializer and set_weights() it: the configuration stays small.
"""

# kind: copy on the host while saving
# budget: 128 MiB
# line: model.save(os.path.join(folder, "model.keras"))
# outside: 192 MiB
import os
import sys
import tempfile

import keras
import numpy as np

matrix = np.random.default_rng(0).random((40000, 100), "float32")  # 15.3 MiB
fixed = "--fixed" in sys.argv
start = "zeros" if fixed else keras.initializers.Constant(matrix)
model = keras.Sequential(
    [
        keras.Input((16,), dtype="int32"),
        keras.layers.Embedding(40000, 100, embeddings_initializer=start),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(1),
    ]
)
if fixed:
    model.layers[0].set_weights([matrix])
model.compile("sgd", "mse")
model.fit(np.zeros((64, 16), "int32"), np.zeros((64, 1)), verbose=0)
with tempfile.TemporaryDirectory() as folder:
    model.save(os.path.join(folder, "model.keras"))
    print(os.path.getsize(os.path.join(folder, "model.keras")) / 2**20, "MiB")
