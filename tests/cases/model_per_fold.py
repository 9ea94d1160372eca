"""Symptom: memory rises with each fold, although the session is cleared (tensorflow/tensorflow#43702, #80753, #80895, #1355).

Mechanism: each model leaves its compiled train function behind, whose graph keeps the memory of the variables.
Fix: one model, whose first weights are set again for each fold.
"""

# kind: models kept alive
# budget: 256 MiB
# line: model = keras.Sequential([keras.Input((512,)),
import sys

import keras
import numpy as np

x, y = np.random.rand(64, 512).astype("float32"), np.random.rand(64, 1).astype("float32")


def build():
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(2048, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


if "--fixed" in sys.argv:
    model = build()
    initial = model.get_weights()
for fold in range(5):
    if "--fixed" in sys.argv:
        model.set_weights(initial)
    else:
        model = build()
    model.fit(x, y, batch_size=16, verbose=0)
    print("fold", fold, model.evaluate(x, y, verbose=0))
    if "--fixed" not in sys.argv:
        keras.backend.clear_session()
