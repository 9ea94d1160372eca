"""Symptom: memory climbs each time the same model is compiled again (tensorflow/tensorflow#55398, keras-team/keras#16320, #9151).

Mechanism: every compile() makes a new optimizer with two slots a weight, and a new train function; the graph of the old
one goes on holding the old slots although no name leads to them. One model, many sets of optimizer state.
Fix: compile once; set the learning rate on the optimizer that exists.
"""

# kind: old optimizers
# budget: 384 MiB
# line: model.compile(keras.optimizers.Adam(1e-3 / (phase + 1)),
import sys

import keras
import numpy as np

x, y = np.random.rand(32, 1024).astype("float32"), np.random.rand(32, 1).astype("float32")
model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(1024, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(1e-3), "mse")
for phase in range(9):
    if "--fixed" in sys.argv:
        model.optimizer.learning_rate = 1e-3 / (phase + 1)
    else:
        model.compile(keras.optimizers.Adam(1e-3 / (phase + 1)), "mse")
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
print("9 phases")
