"""Symptom: out of memory at the end of the first epoch, for a one-hot matrix of 30 columns (keras-team/keras#18243).

Mechanism: a histogram that one-hot encodes every weight in double precision takes 240 bytes for each of 4.
Fix: count by bins without the matrix (or leave histograms off).
"""

# kind: one operation's large output
# budget: 48 MiB
# line: counts = tf.reduce_sum(tf.one_hot(bins, 30,
import sys

import keras
import numpy as np
import tensorflow as tf


class Histogram(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        for weights in self.model.trainable_variables:
            values = tf.reshape(weights.value, [-1])
            bins = tf.histogram_fixed_width_bins(values, [-1.0, 1.0], 30)
            if "--fixed" in sys.argv:
                counts = tf.math.bincount(bins, minlength=30)
            else:
                counts = tf.reduce_sum(tf.one_hot(bins, 30, dtype=tf.float64), axis=0)
            print(weights.path, counts.numpy().max())


x, y = np.random.rand(64, 512).astype("float32"), np.random.rand(64, 1).astype("float32")
model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1024, "relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, y, epochs=2, callbacks=[Histogram()], verbose=0)
