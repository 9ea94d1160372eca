"""Symptom: each custom training step is as slow as the first, and host memory rises with the steps (tensorflow/tensorflow#38002).

Mechanism: tf.function is applied inside the loop, so that each step makes a new function with a trace of its own.
Fix: one function outside the loop.
"""

# kind: retracing
# budget: 128 MiB
# line: def train_step(x, y):
import sys

import tensorflow as tf

weights = tf.Variable(tf.zeros([32, 1]))
x, y = tf.random.normal([512, 32]), tf.random.normal([512, 1])


def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(x @ weights - y))
    weights.assign_sub(0.01 * tape.gradient(loss, weights))
    return loss


compiled = tf.function(train_step)
for epoch in range(40):
    for start in range(0, 512, 256):
        step = compiled if "--fixed" in sys.argv else tf.function(train_step)
        step(x[start : start + 256], y[start : start + 256])
