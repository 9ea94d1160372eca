"""Symptom: host memory runs out while TensorFlow fills a shuffle buffer of modest length (tensorflow/tensor2tensor#1210).

Mechanism: the buffer counts elements, and behind batch() an element is a whole batch.
Fix: shuffle before batch().
"""

# kind: buffer
# budget: 40 MiB
# line: images = images.shuffle(64).batch(32) if "--fixed" in
import sys

import keras
import tensorflow as tf

images = tf.data.Dataset.range(1024).map(lambda n: tf.random.stateless_uniform([64, 64, 3], [0, n]))
images = images.shuffle(64).batch(32) if "--fixed" in sys.argv else images.batch(32).shuffle(64)
model = keras.Sequential(
    [
        keras.Input((64, 64, 3)),
        keras.layers.Conv2D(4, 3, strides=2),
        keras.layers.GlobalMaxPooling2D(),
        keras.layers.Dense(1),
    ]
)
model.compile("sgd", "mse")
model.fit(images.map(lambda batch: (batch, tf.reduce_mean(batch, axis=[1, 2, 3]))), verbose=0)
