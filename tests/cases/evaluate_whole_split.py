"""Symptom: training works, but the evaluation runs out of memory on an activation (tensorflow/models#3046, tensorflow/tensorflow#6019).

Mechanism: the whole test set is given to the model as one batch, and activations grow with the batch.
Fix: evaluate in batches and combine.
"""

# kind: batch-bound activations
# budget: 96 MiB
# line: print(float(tf.reduce_mean(tf.cast(tf.argmax(model(x),
import sys

import keras
import numpy as np
import tensorflow as tf

x, y = np.random.rand(2000, 28, 28, 1).astype("float32"), np.random.randint(0, 10, 2000)
model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 5, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(x[:512], y[:512], batch_size=32, verbose=0)
if "--fixed" in sys.argv:
    print(model.evaluate(x, y, batch_size=100, verbose=0)[1])
else:
    print(float(tf.reduce_mean(tf.cast(tf.argmax(model(x), axis=1) == y, tf.float32))))
