"""Symptom: predict() runs out of memory although a callback has written every output to disk (keras-team/keras#21642).

Mechanism: predict() keeps the outputs of all batches until its end, since it returns them.
Fix: a loop over batches that writes each output away.
"""

# kind: retained tensors
# budget: 256 MiB
# line: model.predict(x, batch_size=100, callbacks=[Writer()],
import sys
import tempfile

import keras
import numpy as np

x = np.random.default_rng(0).random((3200, 64), dtype="float32")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(2048, "relu")])


class Writer(keras.callbacks.Callback):
    def on_predict_batch_end(self, batch, logs):
        write(logs["outputs"])


with tempfile.TemporaryFile() as file:

    def write(outputs):
        file.write(np.asarray(outputs).tobytes())

    if "--fixed" in sys.argv:
        for start in range(0, 3200, 100):
            write(model.predict_on_batch(x[start : start + 100]))
    else:
        model.predict(x, batch_size=100, callbacks=[Writer()], verbose=0)
