"""Symptom: a loop over folds runs out of memory, however often the session is cleared (keras-team/keras#2102, pull request 6037).

Mechanism: a table of the program itself keeps every model. Here it is the list of what fit() returned: a History holds its model.
Fix: keep the numbers, history.history.
"""

# kind: models kept alive
# budget: 256 MiB
import sys

import keras
import numpy as np

x, y = np.random.rand(64, 512).astype("float32"), np.random.rand(64, 1).astype("float32")
histories = {}
for fold in range(5):
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(2048, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    history = model.fit(x, y, batch_size=16, verbose=0)
    histories[fold] = history.history if "--fixed" in sys.argv else history
    del model, history
    keras.backend.clear_session()
print(len(histories), "folds")
