"""Symptom: "OOM when allocating tensor" before the first step, in the line that builds the model.

Mechanism: the weights alone are larger than what there is.
Fix: a smaller model; no batch size helps.
"""

# kind: weights
# budget: 40 MiB
# line: model = keras.Sequential([keras.Input((1024,)),
import sys

import keras

width = 512 if "--fixed" in sys.argv else 2048
model = keras.Sequential([keras.Input((1024,)), *[keras.layers.Dense(width, "relu") for _ in range(4)]])
print(model.count_params())
