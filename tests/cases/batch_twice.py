"""Symptom: out of memory although the batch size is small (tensorflow/tensorflow#29213).

Mechanism: batch(32) is applied twice, so that a step gets 32 times 32 images.
Fix: once; a look at dataset.element_spec tells.
"""

# kind: batch-bound activations
# budget: 96 MiB
# line: model.fit(images.map(lambda batch: (batch,
import sys

import keras
import tensorflow as tf

images = tf.data.Dataset.range(2048).map(lambda n: tf.random.stateless_uniform([24, 24, 1], [0, n])).batch(32)
if "--fixed" not in sys.argv:
    images = images.batch(32)  # another had batched it already
images = images.map(lambda batch: tf.reshape(batch, [-1, 24, 24, 1]))
model = keras.Sequential(
    [
        keras.Input((24, 24, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(32, 3),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(1),
    ]
)
model.compile("sgd", "mse")
model.fit(images.map(lambda batch: (batch, tf.reduce_mean(batch, axis=[1, 2, 3]))).take(8), verbose=0)
