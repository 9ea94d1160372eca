"""Symptom: memory rises in each epoch as soon as a callback is attached (tensorflow/tensorflow#34876).

Mechanism: the callback keeps a copy of all weights of every epoch.
Fix: keep a number for each epoch, here the norm of the weights.
"""

# kind: retained tensors
# budget: 256 MiB
# line: self.seen.append([float(np.linalg.norm(w)) for w in
import sys

import keras
import numpy as np

x, y = np.random.rand(64, 512).astype("float32"), np.random.rand(64, 1).astype("float32")


class Watch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        weights = self.model.get_weights()
        self.seen.append([float(np.linalg.norm(w)) for w in weights] if "--fixed" in sys.argv else weights)


model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1024, "relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
watch = Watch()
model.fit(x, y, batch_size=32, epochs=20, callbacks=[watch], verbose=0)
print(len(watch.seen), "epochs")
