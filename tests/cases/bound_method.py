"""Symptom: a training step that is handed over as a method is traced in every call (tensorflow/tensorflow#31175).

Mechanism: a Python argument is compared as an object, and each `model.step` is a new one.
Fix: name the method once and hand over that.
"""

# kind: retracing
# budget: 128 MiB
# line: @tf.function
import sys

import tensorflow as tf


class Model(tf.Module):
    def __init__(self):
        self.weights = tf.Variable(tf.zeros([32, 1]))

    def step(self, x):
        return tf.reduce_mean(tf.square(x @ self.weights - 1.0))


@tf.function
def train(step, x):
    return step(x)


model = Model()
step = model.step
for batch in range(50):
    train(step if "--fixed" in sys.argv else model.step, tf.random.normal([64, 32]))
