"""Symptom: the first call of a train step dies, with an error of many megabytes, or its graph is too large to be saved.

Mechanism: a NumPy array that a tf.function reads from outside becomes a constant of its graph: it is copied into the graph,
and once more into the allocator when the graph runs.
Fix: give the array as a tensor that exists outside, or in a tf.Variable.
"""

# kind: constants in graphs
# budget: 48 MiB
import sys

import numpy as np
import tensorflow as tf

rows = np.random.default_rng(0).normal(size=(24_000, 256)).astype("float32")  # 23 MiB
if "--fixed" in sys.argv:
    rows = tf.Variable(rows)
weights = tf.Variable(tf.zeros((256, 1)))


@tf.function
def step(numbers):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((tf.gather(rows, numbers) @ weights - 1) ** 2)
    weights.assign_sub(0.01 * tape.gradient(loss, weights))
    return loss


for i in range(20):
    step(tf.constant(np.arange(i, i + 64)))
